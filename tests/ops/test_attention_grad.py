"""Gradients of attention: which inputs ask for one, through lse, through the bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import BACKENDS, KERNEL_BACKENDS, Results, backend_call, check, compare, make, solve
from mask_cases import prefix

from fastattn import AttentionMask

GRADS = ("dq", "dk", "dv", "dbias")
full = pytest.mark.full


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_gradcheck(backend: str, dropout_p: float, device: torch.device) -> None:
    """By finite differences, through out, lse and weights at once."""
    p = make(B=1, H=2, Hk=1, Lq=4, Lk=5, D=3, dtype=torch.float64, device=device, mask="attn_mask", bias=(1, 2, 1, 5))

    def call(q, k, v, bias):
        torch.manual_seed(1)
        mask = AttentionMask(**p.mask, bias=bias)
        out, lse, weights = backend_call(backend, device)(q, k, v, mask, dropout_p, 0.7)
        return out, lse.masked_fill(lse == -torch.inf, 0), weights

    leaves = tuple(t.clone().requires_grad_() for t in (p.q, p.k, p.v, p.bias))
    assert torch.autograd.gradcheck(call, leaves)


# Of a problem (2, 4, 21, 37); the others are of several tiles: sums over samples, heads and query tiles.
SHORT = {"B": 2, "H": 4, "Lq": 21, "Lk": 37, "mask": "key_padding_holes"}
LONG = {"B": 2, "H": 1, "Lq": 70, "Lk": 140, "mask": "key_padding", "dropout_p": 0.25}
BIASES: dict[str, dict[str, Any]] = {
    **{
        str(shape): {**SHORT, "bias": shape}
        for shape in ((1, 4, 21, 37), (2, 4, 21, 37), (1, 1, 21, 37), (2, 1, 1, 37), (2, 1, 21, 1), (2, 4, 1, 1))
    },
    "float32 beside bfloat16": {**SHORT, "bias": (1, 4, 21, 37), "dtype": torch.bfloat16, "bias_dtype": torch.float32},
    "float32 beside float16": {**SHORT, "bias": (1, 1, 21, 37), "dtype": torch.float16, "bias_dtype": torch.float32},
    "long, of keys": {**LONG, "bias": (1, 1, 1, 140)},
    "long, shared": {**LONG, "bias": (1, 1, 70, 140)},
}
EVERYDAY_BIASES = ("(2, 1, 21, 1)", "float32 beside bfloat16", "long, of keys", "long, shared")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERYDAY_BIASES else full) for c in BIASES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias(backend: str, case: str, device: torch.device) -> None:
    check(make(D=16, **BIASES[case], device=device), backend_call(backend, device, weights=False))


@pytest.mark.parametrize("shape", [(21, 37), (21, 1)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_as_torch_takes_it(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Two dimensions: dbias has the shape that was given."""
    attend = backend_call(backend, device, weights=False)
    p = make(D=16, mask="attn_mask", bias=shape, device=device)
    bias = p.bias.clone().requires_grad_()
    out, lse, _ = attend(p.q, p.k, p.v, AttentionMask(**p.mask, bias=bias), 0.0, p.scale)
    torch.autograd.backward((out, lse), (p.dout, p.dlse))
    actual = Results(out.detach(), lse.detach(), None, None, None, None, bias.grad[None, None])
    compare(p.but(bias=p.bias[None, None]), actual, ("out", "lse", "dbias"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_bias_of_whole_rows_changes_no_weight(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """It moves lse alone, so out gives it exactly the gradient 0: what rounds on the way must not show."""
    attend = backend_call(backend, device, weights=False)
    for shape in ((2, 2, 21, 1), (1, 1, 1, 1)):
        p = make(D=16, dtype=dtype, mask="attn_mask", bias=shape, dropout_p=0.3, dlse=False, device=device)
        assert not solve(p, attend, needs="b").dbias.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_bias_masks(backend: str, device: torch.device) -> None:
    """-inf in a bias: the entry is masked, a whole row of it may attend to nothing, and no gradient is NaN."""
    p = make(D=16, bias=(2, 1, 21, 37), mask="causal", device=device)
    p.bias[torch.rand(p.bias.shape, device=device) < 0.3] = -torch.inf
    p.bias[1, 0, 3:6] = -torch.inf
    results = check(p, backend_call(backend, device))
    assert not results.dbias[p.bias == -torch.inf].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_ask_for_a_gradient(backend: str, device: torch.device) -> None:
    p = make(B=1, D=16, mask="attn_mask", bias=(1, 2, 21, 37), device=device)
    for needs in ("q", "k", "v", "b", "qb", "kv"):
        results = solve(p, backend_call(backend, device, weights=False), needs)
        wanted = tuple("d" + {"b": "bias"}.get(n, n) for n in needs)
        assert [name for name in GRADS if getattr(results, name) is not None] == [n for n in GRADS if n in wanted]
        compare(p, results, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_lse_alone_and_of_out_alone(backend: str, device: torch.device) -> None:
    """z-loss: a loss on lse, with and without one on out."""
    p = make(Lq=45, Lk=60, D=16, mask="causal", bias=(1, 1, 45, 60), device=device)
    attend = backend_call(backend, device, weights=False)
    check(p.but(dlse=None), attend)
    z_loss = p.but(dout=torch.zeros_like(p.dout))

    def lse_only(q, k, v, mask, dropout_p, scale):
        out, lse, _ = attend(q, k, v, mask, dropout_p, scale)
        return (out * 0).detach() + 0 * lse[..., None], lse, None  # out itself gets no gradient at all

    results = solve(z_loss, lse_only)
    compare(z_loss, results, ("lse", "dq", "dk", "dbias"))
    assert results.dv is None or not results.dv.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_gradients_are_left_alone(backend: str, device: torch.device) -> None:
    """Neither direction writes into what it was given, and a second backward gives the same again."""
    attend = backend_call(backend, device, weights=False)
    p = make(B=1, D=16, mask="decoder", bias=(1, 2, 1, 37), dropout_p=0.2, device=device)
    given = {name: getattr(p, name).clone() for name in ("q", "k", "v", "bias", "dout", "dlse")}
    leaves = [t.detach().requires_grad_() for t in (p.q, p.k, p.v, p.bias)]
    mask = AttentionMask(**p.mask, bias=leaves[3])
    out, lse, _ = attend(*leaves[:3], mask, p.dropout_p, p.scale)
    first = torch.autograd.grad((out, lse), leaves, (p.dout, p.dlse), retain_graph=True)
    again = torch.autograd.grad((out, lse), leaves, (p.dout, p.dlse))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    for name, before in given.items():
        assert torch.equal(getattr(p, name), before), f"{name} was overwritten"


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_built_without_grad_serves_training(backend: str, device: torch.device) -> None:
    """A mask that was prepared under inference_mode, as in validation, then trains."""
    attend = backend_call(backend, device, weights=False)
    p = make(D=16, mask={"key_padding": prefix([37, 20], 37).to(device)}, device=device)
    mask = AttentionMask(**p.mask)
    with torch.inference_mode():
        attend(p.q, p.k, p.v, mask, 0.0, p.scale)

    def with_that_mask(q, k, v, _, dropout_p, scale):
        return attend(q, k, v, mask, dropout_p, scale)

    check(p, with_that_mask)
