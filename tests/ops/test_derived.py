"""What is made of every op: second derivatives, transforms of torch.func, checkpoints, graphs of torch.compile.

The calls are those of tests/catalogue.py, as in test_properties.py. The backends reference and aten have no operators
of torch.library, except for the loss: there PyTorch traces each step of the formula.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import emulator_build
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from catalogue import (
    EVERYDAY,
    KERNELS,
    PADDING,
    VARIANTS,
    WITH_DROPOUT,
    WITH_GRADIENT,
    call_of,
    every,
    inputs_of,
    random_tensors,
    run,
    scalar,
    takes,
)
from helpers import backends_of
from layouts import LAYOUTS, reversed_dims, swapped_dims
from mask_cases import mask_kinds
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastattn
from fastattn import AttentionMask, use_backend
from fastattn.backends import BACKENDS
from fastattn.check import cases
from fastattn.check.cases import Problem

full = pytest.mark.full
CPU = torch.device("cpu")


def called(
    name: str, backend: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The results of an op, and its inputs."""
    inputs = inputs_of(name, device, dtype)
    return run(name, backend, inputs), inputs


# --- derivatives ------------------------------------------------------------------------------------------------------


def second_derivatives(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """First derivatives, those of the sum of their squares, and the same of the first input's derivative alone."""
    first = torch.autograd.grad(scalar(results), inputs, create_graph=True)
    (alone,) = torch.autograd.grad(scalar(results), inputs[:1], create_graph=True)
    sums = sum(g.double().square().sum() for g in first), alone.double().square().sum()
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return *first, *(t for s in sums for t in torch.autograd.grad(s, inputs, **options))


def is_recorded(backend: str, name: str) -> bool:
    """Whether the op is operators of PyTorch alone whose backward autograd records."""
    if backend != "aten":
        return backend == "reference"
    return not name.startswith(("attention", "loss")) or "lse" in name


# A backward of fused operators names the remedy. PyTorch's fused attention names itself.
REFUSED = r'within fastattn\.use_backend\("reference"\)|flash_attention_for_cpu_backward is not implemented'


@every(backends=[b for b in BACKENDS if b != "reference"])
def test_second_derivatives(name: str, backend: str, device: torch.device) -> None:
    """Those of the reference, or an error, as for a batch of gradients."""
    results, inputs = called(name, backend, device)
    if not is_recorded(backend, name):
        with pytest.raises(RuntimeError, match=REFUSED):
            second_derivatives(results, inputs)
        if backend in KERNELS:
            with pytest.raises(RuntimeError, match=REFUSED):
                torch.autograd.grad(results, inputs, [torch.stack([r, r]) for r in results], is_grads_batched=True)
        return
    found = second_derivatives(results, inputs)
    truth = second_derivatives(*called(name, "reference", device, torch.float64))
    for n, (got, want) in enumerate(zip(found, truth, strict=True)):
        assert (got - want).norm() <= 2e-4 * want.norm() + 1e-6, f"derivative {n}"


@every()
def test_activation_checkpointing(
    name: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recomputed forward draws the same dropout. Without reentry saved tensors can be read only once."""
    results, inputs = called(name, backend, device)
    expected = torch.autograd.grad(scalar(results), inputs)
    monkeypatch.setenv("FASTATTN_BACKEND", backend)  # a GPU's backward is in a thread that use_backend does not reach
    for use_reentrant in (False, True):
        torch.manual_seed(5)
        scalar(checkpoint(call_of(name), *inputs, use_reentrant=use_reentrant)).backward()
        for t, want in zip(inputs, expected, strict=True):
            assert torch.equal(t.grad, want)
            t.grad = None


@every(everyday=(*EVERYDAY, "cuda norm"))
def test_gradients_are_the_callers(name: str, backend: str, device: torch.device) -> None:
    """They may be changed in place between backwards of one graph, as by clipping. No two of them share memory, and no
    kernel writes into an input or a result."""
    results, inputs = called(name, backend, device)
    before = [t.detach().clone() for t in (*inputs, *results)]
    total, found = sum(r.sum() for r in results), []
    for _ in range(2):
        grads = torch.autograd.grad(total, inputs, retain_graph=True)
        found.append([t.clone() for t in grads])
        total.backward(retain_graph=True)
        found.append([t.grad.clone() for t in inputs])
        for t in (*grads, *(t.grad for t in inputs)):
            t.zero_()
    assert all(all(map(torch.equal, found[0], grads)) for grads in found[1:])
    assert len({t.grad.untyped_storage().data_ptr() for t in inputs}) == len(inputs)
    assert all(map(torch.equal, (*inputs, *results), before))


# What leaves the first query nothing.
NO_KEY: dict[str, Callable[[Tensor], AttentionMask]] = {
    "padding": lambda t: AttentionMask(key_padding=(t > 0).expand(2, -1), is_causal=True),
    "a matrix": lambda t: AttentionMask((t > 0)[:, None].expand(-1, len(t)), is_causal=True),
    "a bias": lambda t: AttentionMask(bias=torch.zeros_like(t)[:, None].masked_fill(t[:, None] == 0, -torch.inf)),
}


@pytest.mark.parametrize("kind", NO_KEY)
def test_second_derivatives_where_a_query_sees_no_key(kind: str) -> None:
    """The reference has them, by create_graph=True and by a batch of gradients: no NaN."""
    mask, inputs = NO_KEY[kind](torch.arange(20.0)), random_tensors(((2, 1, 20, 8),) * 3, CPU, torch.float64)
    out = fastattn.scaled_dot_product_attention(*inputs, mask, backend="reference")
    derivatives = second_derivatives((out,), inputs)
    batched = torch.autograd.grad(out, inputs, torch.ones(2, *out.shape), is_grads_batched=True)
    assert all(t.isfinite().all() for t in (*derivatives, *batched))


@every([n for n in WITH_GRADIENT if n not in WITH_DROPOUT], ["reference"], ("attention", "norm", "loss"))
def test_transforms(name: str, backend: str) -> None:
    """torch.func over an op, against plain autograd in float64: grad, jvp, vmap(grad), the Hessian. It needs the
    reference, which is chosen."""
    inputs = inputs_of(name, CPU, torch.float64)
    plain, last = [t.detach() for t in inputs], len(inputs) - 1

    def objective(*tensors: Tensor) -> Tensor:
        return scalar(call_of(name)(*tensors))

    expected = torch.autograd.grad(objective(*inputs), inputs)
    torch.testing.assert_close(grad(objective, tuple(range(len(plain))))(*plain), expected)

    tangents = tuple(torch.randn_like(t) for t in plain)
    slope = sum((g * t).sum() for g, t in zip(expected, tangents, strict=True))
    torch.testing.assert_close(jvp(objective, tuple(plain), tangents)[1], slope)
    several = torch.stack([plain[0], plain[0].flip(0), plain[0] * 0.5])
    of_each = vmap(grad(objective), (0, *(None,) * last))(several, *plain[1:])
    for one, got in zip(several, of_each, strict=True):
        torch.testing.assert_close(got, grad(objective)(one, *plain[1:]))
    torch.testing.assert_close(hessian(objective, last)(*plain), jacrev(grad(objective, last), last)(*plain))


def test_transforms_use_the_reference() -> None:
    """A mask that was made before, and used, is not changed by a transform."""
    mask, q = AttentionMask(key_padding=PADDING), torch.randn(2, 2, 8, 16)

    def objective(q: Tensor, backend: str | None = None) -> Tensor:
        return fastattn.scaled_dot_product_attention(q, q, q, mask, backend=backend).square().sum()

    gradient, leaf = grad(objective)(q), q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="need the backend reference"):
        grad(partial(objective, backend="aten"))(q)
    objective(leaf).backward()
    torch.testing.assert_close(gradient, leaf.grad)


# --- operators of torch.library and their fakes -----------------------------------------------------------------------


class OperatorCalls(TorchDispatchMode):
    """The calls of fastattn's operators made under it: the operator and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastattn":
            self.found[func._opname] = func, args
        return func(*args, **(kwargs or {}))


def results_and_gradients(
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


@every(VARIANTS, (*KERNELS, "aten"), ("cuda attention grouped, dropout", "cuda norm alone", "aten loss"))
def test_opcheck(name: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Schema, autograd registration, AOT dispatch with dynamic shapes; and of every operator, forward and backward,
    fakes with the strides of the results in several layouts of the inputs: Inductor reads memory by them."""
    inputs, calls = inputs_of(name, device), []
    run(name, backend, inputs)  # or skip
    for layout in (torch.clone, *LAYOUTS) if request.config.getoption("--full") else (swapped_dims,):
        with monkeypatch.context() as patch, OperatorCalls() as made:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)  # the ops call their operators
            results_and_gradients(lambda *given: run(name, backend, given), inputs, layout)
        calls += made.found.values()
    assert calls or backend == "aten"
    monkeypatch.undo()  # of conftest's torch.empty: opcheck reads the memory of its tensors as a whole, and its offset
    checked = set()
    for operator, arguments in calls:
        given, options = tree_map_only(Tensor, Tensor.detach, arguments), {}
        if operator in checked or operator._opname.endswith("_backward"):
            options["test_utils"] = ("test_schema", "test_faketensor")
        elif name in WITH_GRADIENT:
            given = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), arguments)
        torch.library.opcheck(operator, given, **options)
        checked.add(operator)


# --- torch.compile ----------------------------------------------------------------------------------------------------

DROPOUT = 0.3


def every_op(backend: str) -> tuple[Callable[..., Any], list[Any]]:
    """A function and the shapes of its inputs. Code that Inductor makes reads every result and every gradient."""
    problems = {name: p for name, p in VARIANTS.items() if takes(name, backend)}

    def function(*given: Tensor, dropout_p: float = DROPOUT) -> list[Tensor]:
        found = []
        for name, p in problems.items():
            inputs, given = given[: len(p.tensors)], given[len(p.tensors) :]
            if dropout_p > 0 or name not in WITH_DROPOUT:
                outputs = call_of(name)(*(t.sin() for t in inputs))
                found += [t.sin() for t in ((outputs,) if isinstance(outputs, Tensor) else outputs)]
        return found

    return function, [t.shape for p in problems.values() for t in p.tensors.values()]


@full
@pytest.mark.parametrize("backend", [*KERNELS, "aten"])
def test_inductor(backend: str, device: torch.device) -> None:
    """Compiled by PyTorch's default compiler, forward and backward: the numbers of eager."""
    if device.type == "cpu" and shutil.which(emulator_build.CXX) is None:
        pytest.skip(f"Inductor needs a C++ compiler: {emulator_build.CXX} is not on PATH")
    run("norm", backend, inputs_of("norm", device))  # or skip
    function, shapes = every_op(backend)
    inputs, found = random_tensors(shapes, device), []
    # Compiled for a GPU, aten drops by the compiler's generator.
    dropout_p = 0.0 if backend == "aten" and device.type != "cpu" else DROPOUT
    # Seeds are drawn as in eager. Graphs that are kept on disk may be of a fake that has changed since.
    options = torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False)
    functorch = {"enable_autograd_cache": False, "donated_buffer": False}  # two backwards of a graph
    with use_backend(backend), options, torch._functorch.config.patch(functorch):
        for each in (torch.compile(function, fullgraph=True), function):
            torch.manual_seed(1)
            found.append(results_and_gradients(partial(each, dropout_p=dropout_p), inputs, reversed_dims))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def attention(kind: str, B: int, Lq: int, Lk: int, **biases: Any) -> Problem:
    return cases.attention(B=B, Lq=Lq, Lk=Lk, D=16, mask=mask_kinds(B, 2, Lq, Lk)[kind], **biases)


# Problems of any batch and lengths.
FREE: dict[str, Callable[[int, int, int], Problem]] = {
    **{f"attention {kind}": partial(attention, kind)
       for kind in ("none", "window", "causal_bottom_right", "key_padding", "attn_mask_per_sample", "decoder")},
    "attention bias": lambda B, Lq, Lk: attention("causal", B, Lq, Lk, bias=(B, 1, Lq, Lk)),
    "attention biases": lambda *n: attention("none", *n, bias=(2, 1, 1), relative_bias=(2, n[1] + n[2] - 1)),
    "norm": lambda B, Lq, Lk: cases.add_layer_norm(rows=(B, Lq), hidden=16, x_bias=True),
    "feed-forward": lambda B, Lq, Lk: cases.feed_forward("gelu", tokens=(B, Lq), d=16, d_ff=20, d_out=24),
    "loss": lambda B, Lq, Lk: cases.linear_cross_entropy(tokens=(B, Lq), d=16, classes=9, label_smoothing=0.1),
    "decoding": lambda B, Lq, Lk: cases.decode_attention(
        batch=B, queries=Lq, positions=Lk, heads=4, head_dim=16, lengths=[Lk - 1] * B, bias=4
    ),
}  # fmt: skip
EVERYDAY_FREE = ("attention decoder", "aten"), ("norm", "cuda"), ("loss", "aten")


@pytest.mark.parametrize(
    "name, backend",
    [
        pytest.param(name, backend, marks=() if (name, backend) in EVERYDAY_FREE else full)
        for name, make in FREE.items()
        for backend in backends_of(make(2, 3, 4).op)
        if backend != "cuda" or "bias" not in name
    ],
)
def test_one_graph_for_all_sizes(name: str, backend: str, device: torch.device) -> None:
    """After a second size there is one graph for all others, whose numbers are those of eager. Lengths may also be
    equal: nothing in a graph compares two of them. A mask is made in the graph."""
    torch._dynamo.reset()
    run("norm", backend, inputs_of("norm", device))  # or skip
    graphs, function = CompileCounterWithBackend("aot_eager"), FREE[name](2, 3, 4).function

    def call(tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
        p = Problem("", "", function, tensors, options)
        return function(**p.arguments(), backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for sizes in ((3, 7, 5), (4, 8, 8), (6, 14, 13 if backend in KERNELS else 33)):  # longer ones have other tiles
        p, found = FREE[name](*sizes).map(lambda t: t.to(device)), []
        for each in (compiled, call):
            leaves = {n: t.clone().requires_grad_(p.differentiable) for n, t in p.tensors.items()}
            out = each(leaves, p.options)
            grads = torch.autograd.grad(out.square().sum(), list(leaves.values())) if p.differentiable else ()
            found.append([out.detach(), *grads])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count <= 2


def test_selective_checkpointing_of_a_graph() -> None:
    """The backend "eager" runs a graph's operators one by one, and the policy keeps their results: none is edited."""
    inputs = inputs_of("feed-forward", CPU)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    @torch.compile(backend="eager", fullgraph=True)
    def call(*given: Tensor) -> Tensor:
        return checkpoint(fastattn.feed_forward, *given, use_reentrant=False, context_fn=contexts)

    found, expected = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (call, fastattn.feed_forward))
    torch.testing.assert_close(found, expected)
