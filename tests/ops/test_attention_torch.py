"""Attention inside PyTorch's machinery: torch.library, torch.compile, autocast."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from attention_checks import BACKENDS, KERNEL_BACKENDS, Problem, Results, backend_call, compare, make, solve
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn.backends import load_backend
from fastattn.backends.reference import philox
from fastattn.masks import Layout, to_operator_args

SDPA = scaled_dot_product_attention


def operator_arguments(p: Problem, backend: str) -> tuple:
    """The arguments of torch.ops.fastattn.attention for a problem."""
    q, k, v, bias = (None if t is None else t.detach().requires_grad_() for t in (p.q, p.k, p.v, p.bias))
    layouts = load_backend("attention", backend).mask_layouts(q, k, v, bias)
    mask = AttentionMask(**p.mask)
    prepared = to_operator_args([mask.prepare(q.shape[2], k.shape[2], layout, q.device) for layout in layouts])
    rng_state = philox.draw_rng_state(p.q.device) if p.dropout_p else None
    return q, k, v, bias, *prepared, p.scale, p.dropout_p, rng_state, backend


SMALL = {"B": 1, "Lq": 8, "Lk": 9, "D": 16}
OPERATOR_PROBLEMS = {
    "masks and dropout": {**SMALL, "mask": "everything", "dropout_p": 0.3},
    "permuted bias": {**SMALL, "mask": "decoder", "bias": (1, 2, 8, 9)},
    "positions before heads, grouped, bfloat16": {**SMALL, "H": 4, "Hk": 2, "Dv": 32, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", OPERATOR_PROBLEMS)
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_opcheck(backend: str, name: str, device: torch.device) -> None:
    """Schema, fake tensors (shapes, dtypes, strides), autograd registration, AOT dispatch with dynamic shapes."""
    backend_call(backend, device)
    p = make(**OPERATOR_PROBLEMS[name], device=device)
    if "before" in name:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (p.q, p.k, p.v))
        p = p.but(q=q, k=k, v=v)
    if "permuted" in name:  # heads vary fastest, as in T5's table of relative positions
        p = p.but(bias=p.bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
    arguments = operator_arguments(p, backend)
    torch.library.opcheck(torch.ops.fastattn.attention.default, arguments)
    mask = AttentionMask(**p.mask)
    layouts = load_backend("attention", backend).mask_layouts(p.q, p.k, p.v, p.bias)[1:]
    of_backward = to_operator_args([mask.prepare(*p.shape[2:], layout, device) for layout in layouts])
    out, lse = torch.ops.fastattn.attention(*arguments)
    given = (p.dout, None, p.q, p.k, p.v, out.detach(), lse.detach(), p.bias, *of_backward, *arguments[6:9])
    operator = torch.ops.fastattn.attention_backward.default
    torch.library.opcheck(operator, (*given, p.bias is not None, backend), test_utils="test_faketensor")
    prepared = to_operator_args([AttentionMask(**p.mask).prepare(*p.shape[2:], Layout(), device)])
    lse = torch.zeros(p.shape[:3], device=device)
    given = (p.q, p.k, lse, p.bias, *prepared, *arguments[6:9], False, backend)
    torch.library.opcheck(torch.ops.fastattn.attention_weights.default, given)


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=() if b in KERNEL_BACKENDS else pytest.mark.full) for b in BACKENDS]
)
def test_compiled_in_one_graph(backend: str, device: torch.device) -> None:
    """The masks' tensors are inputs of the graph; AttentionMask is built and prepared in it."""
    backend_call(backend, device)
    # In a graph aten drops by torch.compile's generator: test_compiled_dropout_of_aten.
    dropout_p = 0.0 if backend == "aten" else 0.3
    p = make(H=4, Hk=2, D=16, mask="everything", bias=(1, 4, 1, 37), dropout_p=dropout_p, device=device)
    tensors = {name: t for name, t in p.mask.items() if isinstance(t, Tensor)}
    flags = {name: value for name, value in p.mask.items() if name not in tensors}
    wanted = {"enable_gqa": True, "return_lse": True, "return_weights": True, "backend": backend}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, bias, tensors, dropout_p, scale):
        return SDPA(q, k, v, AttentionMask(bias=bias, **tensors, **flags), dropout_p, scale=scale, **wanted)

    def attend(q, k, v, mask, dropout_p, scale):
        return call(q, k, v, mask.bias, tensors, dropout_p, scale)

    compiled = solve(p, attend)
    compare(p, compiled, Results._fields)
    if backend in KERNEL_BACKENDS:
        for name, a, b in zip(Results._fields, compiled, solve(p, backend_call(backend, device)), strict=True):
            assert a is b is None or torch.equal(a, b), f"{name}: compiled and eager differ"


@pytest.mark.full
def test_compiled_dropout_of_aten(device: torch.device) -> None:
    """Out and the gradients are those of the weights that are left."""
    q, k, v = (torch.randn(2, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        return SDPA(q, k, v, dropout_p=0.3, return_weights=True, backend="aten")

    out, weights = call(q, k, v)
    dv = torch.autograd.grad(out, v, dout)[0]
    assert 0.2 < (weights == 0).double().mean() < 0.4
    torch.testing.assert_close(out, weights @ v)
    torch.testing.assert_close(dv, weights.mT @ dout)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_one_graph_for_many_lengths(backend: str, device: torch.device) -> None:
    """Lengths that change from batch to batch compile once more, then no more."""
    backend_call(backend, device)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=graphs)
    def call(q, k, v, key_padding):
        return SDPA(q, k, v, AttentionMask(key_padding=key_padding, is_causal=True), backend=backend)

    for L in (5, 9, 14):
        p = make(B=2, H=2, Lq=L, Lk=L, D=16, mask="key_padding", device=device)
        p = p.but(mask={**p.mask, "is_causal": True})
        out = call(p.q, p.k, p.v, p.mask["key_padding"])
        compare(p, Results(out, *[None] * 6), ("out",))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, device: torch.device) -> None:
    """Under autocast float32 inputs give a bfloat16 result and float32 gradients, as torch's own operator does."""
    backend_call(backend, device)
    p = make(mask="decoder", bias=(1, 2, 21, 37), device=device)
    leaves = [t.clone().requires_grad_() for t in (p.q, p.k, p.v, p.bias)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = SDPA(*leaves[:3], AttentionMask(**p.mask, bias=leaves[3]), scale=p.scale, backend=backend)
    assert out.dtype == torch.bfloat16
    out.backward(p.dout.bfloat16())
    low = p.but(**{n: getattr(p, n).bfloat16() for n in ("q", "k", "v", "dout")}, dlse=None)
    grads = [leaf.grad for leaf in leaves]
    assert all(grad.dtype == torch.float32 for grad in grads)
    as_computed = Results(out.detach(), None, None, *(grad.bfloat16() for grad in grads[:3]), grads[3])
    compare(low, as_computed, ("out", "dq", "dk", "dv", "dbias"))
