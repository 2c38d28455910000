"""What torch.compile traces for a GPU, tried on any machine: tensors on a GPU that have no memory."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import backends_of
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import Explanation, explain
from fastattn.backends import OPS, cuda
from fastattn.check import cases

launch = importlib.import_module("fastattn.kernels.common.launch")
GPU = torch.device("cuda", 0)
PROBLEMS = {problem.op: problem for problem in cases.problems(torch.device("cpu"), large=False)}  # the last of each


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cuda_on_a_cpu: None) -> Iterator[SimpleNamespace]:
    """What the backends believe to be a GPU, also where none is; and that fastattn._C was built, where the emulator
    is loaded."""
    properties = SimpleNamespace(major=9, minor=0, name="some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    properties.driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=properties.driver))
    if (emulator := cuda.extension(on_gpu=False)) is not None:
        monkeypatch.setitem(sys.modules, "fastattn._C", emulator)
    forget_the_machine()
    yield properties
    forget_the_machine()


def forget_the_machine() -> None:
    """What the backends found out about it; but not the emulator, which a process loads once."""
    for value in (*vars(launch).values(), *vars(cuda).values()):
        if hasattr(value, "cache_clear") and "path" not in inspect.signature(value).parameters:
            value.cache_clear()


def on_gpu(problem: cases.Problem, mode: FakeTensorMode) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The problem's tensors, in bfloat16, and its options."""

    def fake(value: Any) -> Any:
        return mode.from_tensor(value).to(GPU) if isinstance(value, torch.Tensor) else value

    tensors = {name: fake(t).bfloat16() for name, t in problem.tensors.items()}
    return tensors, {name: fake(value) for name, value in problem.options.items()}


def explained(op: str) -> Explanation:
    with FakeTensorMode() as mode:
        tensors, options = on_gpu(PROBLEMS[op], mode)
        return explain(PROBLEMS[op].function, **tensors, **options)


EVERYDAY = ("attention", "triton"), ("add_layer_norm", "cuda"), ("linear_cross_entropy", "triton")


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "op, backend",
    [
        pytest.param(op, backend, marks=() if (op, backend) in EVERYDAY else pytest.mark.full)
        for op in PROBLEMS
        for backend in backends_of(OPS[op].backend_module, kernels_only=True)
    ],
)
def test_one_graph(op: str, backend: str, dynamic: bool | None, gpu: SimpleNamespace) -> None:
    """No graph break, and nothing in the graph that reads the device; also where the rule chooses the backend."""
    torch.compiler.reset()  # of the same lines for the ops before
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append({getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes})
        return graph

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=keep)
    def call(tensors, options, backend):
        return PROBLEMS[op].function(**tensors, **options, backend=backend)

    for requested in (backend, None):
        with FakeTensorMode() as mode:
            outputs = call(*on_gpu(PROBLEMS[op], mode), requested)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(out.device == GPU for out in outputs)
        assert not any("device" in target for target in graphs[-1]), graphs[-1]
    assert len(graphs) == 2


def test_triton_needs_tensor_cores_of_nvidia(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained("feed_forward").refusals["triton"] is None
    vars(gpu).update(major=7, minor=5)
    forget_the_machine()
    assert "compute capability 8.0, got 7.5" in explained("feed_forward").refusals["triton"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    forget_the_machine()
    assert "need an NVIDIA GPU, got some GPU" in explained("feed_forward").refusals["triton"]


def test_without_a_compiler_triton_is_not_chosen(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles C before its first launch. This is tried once, and explain prints its error."""
    asked = []

    def cannot_compile() -> None:
        asked.append(None)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore of it")

    monkeypatch.setattr(gpu.driver, "get_current_target", cannot_compile)
    for op in PROBLEMS:
        explanation = explained(op)
        assert explanation.chosen in ("aten", "cuda") and not explanation.refusals[explanation.chosen]
        reason = explanation.refusals["triton"]
        assert reason.endswith(": Failed to find C compiler. Please specify via CC environment variable.")
    assert len(asked) == 1
