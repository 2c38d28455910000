"""Every op under torch.compile: the operators that it calls, what their fakes promise, Inductor, sizes that change.

The backends reference and aten have no operators, except for the loss: there PyTorch traces each step of the formula.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import emulator_build
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from attention_checks import Results, backend_call, compare, make, solve
from layouts import LAYOUTS, reversed_dims
from small_calls import ALL, EVERYDAY, OPS, WITH_DROPOUT, WITHOUT_GRADIENT, call_of, inputs_of, random_tensors, run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastattn
from fastattn import AttentionMask, use_backend
from fastattn.backends import BACKENDS
from fastattn.masks import alibi

full = pytest.mark.full
KERNELS = ("triton", "cuda")


class OperatorCalls(TorchDispatchMode):
    """The calls of fastattn's operators made under it: the operator and its arguments."""

    def __init__(self, check_fakes: bool = False) -> None:
        super().__init__()
        self.check_fakes = check_fakes
        self.found: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = func(*args, **(kwargs or {}))
        if func.namespace == "fastattn":
            self.found[func._opname] = func, args
            if self.check_fakes:
                with FakeTensorMode() as mode:
                    fake = func(*tree_map_only(Tensor, mode.from_tensor, args))
                for n, (f, r) in enumerate(zip(tree_leaves(fake), tree_leaves(real), strict=True)):
                    assert (f.shape, f.dtype, strides(f)) == (r.shape, r.dtype, strides(r)), f"{func}, output {n}"
        return real


def strides(t: Tensor) -> list[int]:
    """Those that tell where an element is."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1 and t.numel() > 0]


@contextmanager
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ops call their operators, as if they were traced."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


def results(
    call: Callable[..., Any], given: Sequence[Tensor], layout: Callable[[Tensor], Tensor] = lambda t: t
) -> list[Tensor]:
    """What a call returns, and the gradients, of all results and of the first alone. All tensors have this layout."""
    inputs = [layout(t.detach()).requires_grad_() for t in given]
    outputs = call(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    found = [out.detach() for out in outputs]
    outputs = [out for out in outputs if out.requires_grad]
    drawn = random_tensors([out.shape for out in outputs], given[0].device)
    douts = [layout(d) if d.dim() > 0 else d for d in drawn]
    for some in (slice(None), slice(1)) if outputs else ():
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found += torch.autograd.grad(outputs[some], inputs, douts[some], **options)
    return found


# The fakes are shared, and the interpreter takes eight times as long.
@pytest.mark.bug_class("T3", "T22")
@pytest.mark.parametrize("backend", ["cuda", pytest.param("triton", marks=full)])
def test_fakes_have_the_layout_of_results(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of every operator, forward and backward. Inductor reads memory as a fake says. The everyday tier has each op in
    two layouts."""
    called = set()
    for i, name in enumerate(ALL):
        inputs = inputs_of(name, device)
        for layout in LAYOUTS if request.config.getoption("--full") else LAYOUTS[i % 3 :: 3]:
            with operators(monkeypatch), OperatorCalls(check_fakes=True) as calls:
                results(lambda *given, name=name: run(name, backend, given), inputs, layout)
            called |= set(calls.found)
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastattn::")}
    # Of aten alone, tested in test_accelerate.py and test_cpu_matmul.py.
    assert called | {"dropout_kept", "product"} == {name.removeprefix("fastattn::") for name in defined}


@pytest.mark.few(5)
@pytest.mark.bug_class("T22")
@pytest.mark.parametrize(
    "name, backend",
    [
        pytest.param(
            name, backend, marks=() if backend != "triton" and name in (*EVERYDAY, *WITHOUT_GRADIENT) else full
        )
        for name in ALL
        for backend in ("triton", "cuda", *(["aten"] if name.startswith("loss") else []))
    ],
)
def test_opcheck(name: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""
    inputs = inputs_of(name, device)
    run(name, backend, inputs)  # or skip
    with operators(monkeypatch), OperatorCalls() as calls:
        run(name, backend, inputs)
    assert calls.found
    for operator, arguments in calls.found.values():
        given = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad and name in OPS), arguments)
        torch.library.opcheck(operator, given)


DROPOUT = 0.3


def layer(*given: Tensor, dropout_p: float = DROPOUT) -> tuple[Tensor, ...]:
    """Every op that has a gradient, each with the result of the one before."""
    embedding, weight, bias, attn_bias, weight1, weight2, classes = given
    table = torch.linspace(-1, 1, 5 * 16, device=weight.device).view(5, 16)
    tokens = torch.tensor([[3, 0, 2, 5], [1, 1, 4, 2]], device=weight.device)
    x = torch.nn.functional.embedding(tokens, embedding) + table[:4]
    x = fastattn.dropout_add_layer_norm(x, None, weight, bias, dropout_p=dropout_p)
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    out = fastattn.scaled_dot_product_attention(heads, heads, heads, attn_bias.sin(), dropout_p)
    x = fastattn.dropout_add_layer_norm(out.transpose(1, 2).flatten(2), x, weight, bias, dropout_p=dropout_p)
    x = fastattn.feed_forward(x, weight1, None, weight2, bias, dropout_p=dropout_p)
    return tuple(fastattn.linear_cross_entropy(x, classes, tokens, reduction=r) for r in ("mean", "none"))


LAYER = ((6, 16), (16,), (16,), (1, 2, 4, 4), (32, 16), (16, 32), (11, 16))


def every_op(backend: str) -> tuple[Callable[..., list[Tensor]], list[Any]]:
    """A function and the shapes of its inputs. Code that Inductor makes reads every result and every gradient."""
    is_biased = {name: name.startswith("attention") and "bias" in problem.tensors for name, problem in ALL.items()}
    problems = {name: problem for name, problem in ALL.items() if backend != "cuda" or not is_biased[name]}

    def function(*given: Tensor, dropout_p: float = DROPOUT) -> list[Tensor]:
        found = []
        for name, problem in problems.items():
            inputs, given = given[: len(problem.tensors)], given[len(problem.tensors) :]
            if dropout_p > 0 or name not in WITH_DROPOUT:
                outputs = call_of(name)(*(t.sin() for t in inputs))
                found += [t.sin() for t in ((outputs,) if isinstance(outputs, Tensor) else outputs)]
        return found

    return function, [t.shape for problem in problems.values() for t in problem.tensors.values()]


@pytest.mark.bug_class("T22", "T23")
@pytest.mark.parametrize(
    "function, shapes, backend",
    [
        pytest.param(layer, LAYER, "triton", marks=full),
        *(pytest.param(*every_op(b), b, marks=full) for b in (*KERNELS, "aten")),
    ],
)
def test_inductor(function: Callable[..., Any], shapes: Sequence[Any], backend: str, device: torch.device) -> None:
    """Compiled by PyTorch's default compiler, forward and backward: the numbers of eager."""
    if device.type == "cpu" and shutil.which(emulator_build.CXX) is None:
        pytest.skip(f"Inductor needs a C++ compiler: {emulator_build.CXX} is not on PATH")
    inputs = random_tensors(shapes, device)
    run("norm", backend, inputs_of("norm", device))  # or skip
    # Compiled for a GPU, aten drops by the compiler's generator.
    dropout_p = 0.0 if backend == "aten" and device.type != "cpu" else DROPOUT
    found = []
    # Seeds are drawn as in eager. Graphs that are kept on disk may be of a fake that has changed since.
    options = torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False)
    with use_backend(backend), options, torch._functorch.config.patch(enable_autograd_cache=False):
        for each in (torch.compile(function, fullgraph=True), function):
            torch.manual_seed(1)
            found.append(results(partial(each, dropout_p=dropout_p), inputs, reversed_dims))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def tokens_below(x: Tensor, end: int) -> Tensor:
    """Integers that depend on x, (B, L)."""
    return (x[..., 0].detach().abs() * 7).long() % end


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k = (x @ weight).unflatten(-1, (2, 8)).transpose(1, 2), x.unflatten(-1, (2, 8)).transpose(1, 2)
    mask = AttentionMask(key_padding=tokens_below(x, 5) > 0, window=(4, 2))
    return fastattn.scaled_dot_product_attention(q, k, k, mask, scale=0.3)


def plain_attention(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.dropout_add_layer_norm(x, x.sin(), weight[0], weight[1])


def feed_forward(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.feed_forward(x, weight, weight[0], weight, None, "gelu")


def loss(x: Tensor, weight: Tensor) -> Tensor:
    return fastattn.linear_cross_entropy(x, weight, tokens_below(x, 16), label_smoothing=0.1, ignore_index=3)


def decoding(x: Tensor, weight: Tensor) -> Tensor:
    keys = x.detach()[:, :, None, None].contiguous()
    with torch.no_grad():
        out = fastattn.decode_attention((x @ weight)[:, :1, None], keys, keys)
    return x + out.squeeze(2)


SHORT = (plain_attention, norm, feed_forward, loss)  # seconds in the emulator, without the others


@pytest.mark.few(4)
@pytest.mark.bug_class("T22", "T23")
@pytest.mark.parametrize(
    "op, backend",
    [
        pytest.param(op, backend, marks=() if backend == "aten" or (backend == "cuda" and op in SHORT) else full)
        for op in (attention, plain_attention, norm, feed_forward, loss, decoding)
        for backend in BACKENDS
    ],
)
def test_one_graph_for_all_sizes(op: Callable[..., Any], backend: str, device: torch.device) -> None:
    """Sizes that change from batch to batch: one graph more, then no more. Results and gradients are those of eager."""
    torch._dynamo.reset()
    run("norm", backend, inputs_of("norm", device))  # or skip
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, backend=graphs)
    for sizes in ((2, 5), (3, 7), (4, 12), (6, 14 if backend in KERNELS else 33)):  # longer ones have other tiles
        found = []
        for call in (compiled, op):
            x, weight = random_tensors(((*sizes, 16), (16, 16)), device)
            with use_backend(backend):
                out = call(x, weight)
            grads = torch.autograd.grad(out.square().sum(), (x, weight), allow_unused=True)
            found.append([out.detach(), *(g for g in grads if g is not None)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count <= 2


MASKS: dict[str, Callable[[Tensor, Tensor], AttentionMask | None]] = {
    "none": lambda real, bias: None,
    "causal": lambda real, bias: AttentionMask(is_causal=True),
    "window": lambda real, bias: AttentionMask(window=(4, 2)),
    "bottom right": lambda real, bias: AttentionMask(is_causal=True, align="bottom_right"),
    "padding": lambda real, bias: AttentionMask(key_padding=real),
    "bool": lambda real, bias: AttentionMask(bias > 0),
    "bias": lambda real, bias: AttentionMask(bias=bias),
    "bias of heads": lambda real, bias: AttentionMask(  # whose number is a constant here
        bias=torch.ones(2, 1, 1), relative_bias=alibi(torch.ones(2), *bias.shape[2:])
    ),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "causal" else full) for kind in MASKS])
@pytest.mark.parametrize("backend", ["aten", pytest.param("reference", marks=full)])
def test_graphs_of_all_lengths(backend: str, kind: str) -> None:
    """Two sequences whose lengths are free may also be equally long: nothing in a graph compares the two. One mask is
    for both calls, unless it is as wide as the queries."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, real: Tensor, bias: Tensor) -> Tensor:
            mask, call = MASKS[kind](real, bias), partial(fastattn.scaled_dot_product_attention, backend=backend)
            memory = k if kind.startswith("b") and kind != "bottom right" else call(k, k, k, mask)
            return call(q, memory, k, mask)

    def inputs(batch: int, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
        shapes = (batch, 2, seqlen_q, 8), (batch, 2, seqlen_k, 8), (batch, 1, seqlen_q, seqlen_k)
        q, k, bias = (t.detach() for t in random_tensors(shapes, torch.device("cpu")))
        return [q, k, torch.arange(seqlen_k).expand(batch, -1) < seqlen_k - 1, bias]

    torch._dynamo.reset()
    module, graphs = Attention(), CompileCounterWithBackend("eager")
    batch, seqlen_q, seqlen_k = (torch.export.Dim(name, min=2, max=40) for name in ("batch", "seqlen_q", "seqlen_k"))
    shapes = (
        {0: batch, 2: seqlen_q},
        {0: batch, 2: seqlen_k},
        {0: batch, 1: seqlen_k},
        {0: batch, 2: seqlen_q, 3: seqlen_k},
    )
    exported = torch.export.export(module, tuple(inputs(3, 7, 5)), dynamic_shapes=shapes, strict=False).module()
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=graphs)
    for sizes in ((3, 7, 5), (2, 9, 4), (4, 6, 6), (2, 3, 11), (2, 2, 2)):
        for call in (exported, compiled):
            torch.testing.assert_close(call(*inputs(*sizes)), module(*inputs(*sizes)), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == 1


IN_A_TRACE = "attention packed", "norm with sum and dropout", "loss"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_A_TRACE else full) for n in OPS])
@pytest.mark.parametrize("backend", ["aten", *(pytest.param(b, marks=full) for b in ("reference", *KERNELS))])
def test_fake_tensors_and_make_fx(backend: str, name: str, device: torch.device) -> None:
    """Where nothing is compiled: shapes without values, and a graph of operators that computes the same."""
    inputs = inputs_of(name, device)
    run(name, backend, inputs)  # or skip
    plain = [t.detach() for t in inputs]

    def forward_and_backward(*given: Tensor) -> tuple[Tensor, ...]:
        given = tuple(t.requires_grad_() for t in map(torch.clone, given))
        torch.manual_seed(5)
        with use_backend(backend):
            outputs = call_of(name)(*given)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return *outputs, *torch.autograd.grad(sum(out.sum() for out in outputs), given)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = forward_and_backward(*map(mode.from_tensor, plain))
    wanted = forward_and_backward(*plain)
    assert [(f.shape, f.dtype) for f in fakes] == [(t.shape, t.dtype) for t in wanted]
    assert all(isinstance(f, FakeTensor) for f in fakes)
    graph = make_fx(forward_and_backward)(*plain)
    torch.manual_seed(5)
    traced = graph(*plain)
    if backend != "aten" or name not in WITH_DROPOUT:  # traced, aten drops by the operator's generator
        torch.testing.assert_close(traced, wanted, rtol=1e-4, atol=1e-5)


def test_selective_checkpointing_of_a_graph() -> None:
    """The backend "eager" runs a graph's operators one by one, and the policy keeps their results: none is edited."""
    inputs = inputs_of("feed-forward", torch.device("cpu"))
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    @torch.compile(backend="eager", fullgraph=True)
    def call(*given: Tensor) -> Tensor:
        return checkpoint(fastattn.feed_forward, *given, use_reentrant=False, context_fn=contexts)

    found, expected = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (call, fastattn.feed_forward))
    torch.testing.assert_close(found, expected)


@pytest.mark.few(1)
@pytest.mark.bug_class("T22")
@pytest.mark.parametrize("backend", ["triton", "cuda", *(pytest.param(b, marks=full) for b in ("aten", "reference"))])
def test_attention_in_one_graph(backend: str, device: torch.device) -> None:
    """The masks' tensors are inputs of the graph; AttentionMask is built and prepared in it."""
    backend_call(backend, device)
    # What aten drops in a graph: test_compiled_dropout_of_aten.
    dropout_p = 0.0 if backend == "aten" else 0.3
    bias = None if backend == "cuda" else (1, 2, 1, 37)  # its kernels have none
    p = make(B=1, H=2, Hk=1, D=16, mask="everything", bias=bias, dropout_p=dropout_p, device=device)
    tensors = {name: t for name, t in p.mask.items() if isinstance(t, Tensor)}
    flags = {name: value for name, value in p.mask.items() if name not in tensors}
    wanted = {"enable_gqa": True, "return_lse": True, "return_weights": backend not in KERNELS, "backend": backend}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, bias, tensors, dropout_p, scale):
        mask = AttentionMask(bias=bias, **tensors, **flags)
        return fastattn.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, **wanted)

    def attend(q, k, v, mask, dropout_p, scale):
        results = call(q, k, v, mask.bias, tensors, dropout_p, scale)
        return results if wanted["return_weights"] else (*results, None)

    compiled = solve(p, attend)
    compare(p, compiled)
    if backend in KERNELS:
        for name, a, b in zip(Results._fields, compiled, solve(p, backend_call(backend, device)), strict=True):
            assert a is b is None or torch.equal(a, b), f"{name}: compiled and eager differ"


@full
def test_decoding_in_one_graph_for_all_sizes() -> None:
    """The numbers of rows and heads are symbolic, too."""
    (q, k), bias = random_tensors(((2, 3, 4, 8), (2, 6, 3, 2, 8)), torch.device("cpu")), torch.ones(4, 6)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return fastattn.decode_attention(q, k, k, bias=bias)

    with torch.no_grad():
        compiled = torch.compile(call, backend="aot_eager", dynamic=True, fullgraph=True)
        torch.testing.assert_close(compiled(q, k), call(q, k))


@full
def test_compiled_dropout_of_aten(device: torch.device) -> None:
    """Out and the gradients are those of the weights that are left."""
    q, k, v = (torch.randn(2, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        return fastattn.scaled_dot_product_attention(q, k, v, dropout_p=0.3, return_weights=True, backend="aten")

    out, weights = call(q, k, v)
    dv = torch.autograd.grad(out, v, dout)[0]
    assert 0.2 < (weights == 0).double().mean() < 0.4
    torch.testing.assert_close(out, weights @ v)
    torch.testing.assert_close(dv, weights.mT @ dout)
