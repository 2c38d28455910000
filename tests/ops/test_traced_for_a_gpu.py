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
from helpers import has_kernel
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import explain, scaled_dot_product_attention
from fastattn.backends import OPS, cuda
from fastattn.backends.aten import _plain
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
    """No graph break, and nothing in the graph that reads the device; also where the rule chooses the backend."""
    torch.compiler.reset()  # of the same lines for the ops before
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append({getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes})
        return graph

    @torch.compile(fullgraph=True, backend=keep)
    def call(tensors, options, backend):
        return PROBLEMS[op].function(**tensors, **options, backend=backend)

    for requested in (backend, None):
        with FakeTensorMode() as mode:
            outputs = call(*on_gpu(PROBLEMS[op], mode), requested)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(out.device == GPU for out in outputs)
        assert not any("device" in target for target in graphs[-1]), graphs[-1]
    assert len(graphs) == 2


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


@pytest.mark.parametrize("backend", ["triton"])
def test_cudnn_computes_what_has_no_mask(backend: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """aten excludes cuDNN's kernel only where there is a mask: see backends/aten/_plain.py."""
    allowed = []

    def torch_attention(q: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.empty_like(q)

    monkeypatch.setattr(_plain, "torch_attention", torch_attention)
    with FakeTensorMode():
        q = torch.empty(2, 3, 8, 64, dtype=torch.bfloat16, device=GPU)
        for is_causal in (False, True):
            scaled_dot_product_attention(q, q, q, is_causal=is_causal, backend="aten")
        _plain._one_call(q, q, q, torch.empty(8, 8, dtype=q.dtype, device=GPU), None, None, 1.0, 0.0)
    assert allowed == [True, True, False]
