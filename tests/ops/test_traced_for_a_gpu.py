"""What torch.compile traces for a GPU, tried on any machine: tensors on a GPU that have no memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import explain
from fastattn.backends import OPS, cuda, has_kernel
from fastattn.check import cases

launch = importlib.import_module("fastattn.kernels.common.launch")
GPU = torch.device("cuda", 0)
PROBLEMS = {problem.op: problem for problem in cases.problems(torch.device("cpu"), large=False)}  # the last of each


@pytest.fixture
def gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the backends believe to be a GPU, also where none is; and that fastattn._C was built."""
    properties = SimpleNamespace(major=9, minor=0, name="some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    properties.driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=properties.driver))
    if backend == "cuda" and not torch.cuda.is_available():
        if cuda._emulator is None:
            pytest.skip("there is no fastattn._C on this machine")
        monkeypatch.setitem(sys.modules, "fastattn._C", cuda._emulator)
    answers = cuda._compiled, cuda._gpu_problem, launch._gpu_problem, launch._properties
    forget = [answer.cache_clear for answer in answers]
    for each in forget:
        each()
    yield properties
    for each in forget:
        each()


def on_gpu(problem: cases.Problem, mode: FakeTensorMode) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The problem's tensors, in bfloat16, and its options."""

    def fake(value: Any) -> Any:
        return mode.from_tensor(value).to(GPU) if isinstance(value, torch.Tensor) else value

    tensors = {name: fake(t).bfloat16() for name, t in problem.tensors.items()}
    return tensors, {name: fake(value) for name, value in problem.options.items()}


@pytest.mark.few(4)
@pytest.mark.bug_class("T16", "T22")
@pytest.mark.parametrize(
    ("op", "backend"),
    [(op, b) for op, b in product(PROBLEMS, ("triton", "cuda")) if has_kernel(OPS[op].backend_module, b)],
)
def test_one_graph(op: str, backend: str, gpu: SimpleNamespace) -> None:
    """No graph break, and nothing in the graph that reads the device."""
    torch.compiler.reset()  # of the same lines for the ops before
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append({getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes})
        return graph

    @torch.compile(fullgraph=True, backend=keep)
    def call(tensors, options):
        return PROBLEMS[op].function(**tensors, **options, backend=backend)

    with FakeTensorMode() as mode:
        outputs = call(*on_gpu(PROBLEMS[op], mode))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(out.device == GPU for out in outputs)
    assert len(graphs) == 1
    assert not any("device" in target for target in graphs[0]), graphs[0]


@pytest.mark.parametrize("backend", ["triton"])
def test_triton_wants_tensor_cores_of_nvidia(
    backend: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older GPUs and those of other vendors are refused by name."""
    x = SimpleNamespace(is_cuda=True, device=GPU)
    assert launch.unsupported_device(x) is None
    gpu.major, gpu.minor = 7, 5
    launch._gpu_problem.cache_clear()
    assert launch.unsupported_device(x) == "the Triton kernels need compute capability 8.0, got 7.5"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu.name = "some accelerator"
    launch._gpu_problem.cache_clear()
    assert launch.unsupported_device(x) == "the Triton kernels need an NVIDIA GPU, got some accelerator"


@pytest.mark.parametrize("backend", ["triton"])
def test_without_a_compiler_triton_is_not_chosen(
    backend: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles C before its first launch. This is tried once, and explain prints its error."""
    asked = []

    def cannot_compile() -> None:
        asked.append(None)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore of it")

    monkeypatch.setattr(gpu.driver, "get_current_target", cannot_compile)
    with FakeTensorMode() as mode:
        for problem in PROBLEMS.values():
            tensors, options = on_gpu(problem, mode)
            explanation = explain(problem.function, **tensors, **options)
            reason = explanation.refusals["triton"]
            assert explanation.chosen in ("aten", "cuda") and not explanation.refusals[explanation.chosen]
            assert reason.endswith(": Failed to find C compiler. Please specify via CC environment variable.")
    assert len(asked) == 1
