"""Gradients of attention: who asks for one, in which layout it arrives and leaves, through lse and through the bias."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_checks import (
    BACKENDS,
    KERNEL_BACKENDS,
    LOW_PRECISION,
    Results,
    backend_call,
    check,
    compare,
    exact,
    less_exact,
    make,
    plain,
    solve,
    visible,
)
from helpers import assert_close_as_torch
from mask_cases import prefix
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention
from fastattn._dispatch import load_backend
from fastattn.reference import philox

GRADS = ("dq", "dk", "dv", "dbias")


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


# (B, H, Lq, Lk) of the problem is (2, 4, 21, 37).
FULL_BIASES = [(1, 1, 21, 37), (1, 4, 21, 37), (2, 4, 21, 37), (21, 37)]
THIN_BIASES = [(2, 1, 1, 37), (1, 1, 1, 37), (2, 1, 21, 1), (2, 4, 1, 1)]


@pytest.mark.parametrize("shape", FULL_BIASES + THIN_BIASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_shapes(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    p = make(H=4, D=16, mask="key_padding_holes", bias=shape, device=device)
    if len(shape) < 4:  # a tensor as torch takes it; dbias has the shape that was given
        bias = p.bias.clone().requires_grad_()
        mask = AttentionMask(**p.mask, bias=bias)
        out, lse, _ = backend_call(backend, device, weights=False)(p.q, p.k, p.v, mask, 0.0, p.scale)
        torch.autograd.backward((out, lse), (p.dout, p.dlse))
        four = p.but(bias=p.bias[None, None])
        actual = Results(out.detach(), lse.detach(), None, None, None, None, bias.grad[None, None])
        compare(four, actual, ("out", "lse", "dbias"))
    else:
        check(p, backend_call(backend, device))


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_bias_on_16_bit_queries(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    p = make(mask="causal", dtype=dtype, bias=(1, 2, 21, 37), bias_dtype=torch.float32, device=device)
    check(p, backend_call(backend, device))


@pytest.mark.parametrize("shape", [(1, 1, 1, 140), (1, 1, 70, 140)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_over_several_tiles(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Sums over samples, and over query tiles for a bias of keys alone."""
    p = make(B=2, H=1, Lq=70, Lk=140, D=16, mask="key_padding", bias=shape, dropout_p=0.25, device=device)
    check(p, backend_call(backend, device, weights=False))


# One number for a whole row of scores, of a problem (2, 2, 21, 37).
ROW_BIASES = [(2, 2, 21, 1), (1, 1, 21, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("dropout_p, dlse", [(0.0, False), (0.3, False), (0.0, True), (0.3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
@pytest.mark.parametrize("shape", ROW_BIASES, ids=str)
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_bias_of_whole_rows(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, dropout_p: float, dlse: bool, device: torch.device
) -> None:
    """It moves lse but no weight, so out alone gives it the gradient 0: what rounds on the way must not show.

    The bias is float32, which hides no error behind a rounding to 16 bits. Some rows see nothing, one by the bias.
    """
    attend = backend_call(backend, device, weights=False)
    results = []
    for seed in range(1 if shape[2] > 1 else 4):  # the plain formula's error on one number would be a matter of luck
        p = make(D=16, dtype=dtype, mask="attn_mask", bias=shape, bias_dtype=torch.float32, seed=seed, device=device)
        p = p.but(dropout_p=dropout_p, dlse=p.dlse if dlse else None)
        if shape[2] > 1:
            p.bias[0, 0, 3] = -torch.inf
        truth = exact(p)
        results.append([r.dbias for r in (solve(p, attend), truth, less_exact(p, truth))])
    assert_close_as_torch(*(torch.cat(dbias) for dbias in zip(*results, strict=True)), "dbias")


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_of_whole_rows_as_torch_takes_it(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """A 16-bit tensor (Lq, 1): dbias has its shape and dtype, and only the last step rounds to it."""
    attend = backend_call(backend, device, weights=False)
    p = make(D=16, dtype=dtype, mask="attn_mask", bias=(1, 1, 21, 1), dlse=False, device=device)
    bias = p.bias[0, 0].clone().requires_grad_()
    attend(p.q, p.k, p.v, AttentionMask(**p.mask, bias=bias), 0.0, p.scale)[0].backward(p.dout)
    low = plain(p.but(bias=p.bias.float())).dbias[0, 0].to(dtype)
    assert_close_as_torch(bias.grad, exact(p).dbias[0, 0], low, "dbias")


@pytest.mark.parametrize("shape", ROW_BIASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_of_rows_that_see_nothing(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    """The lse of such a row may get any gradient, NaN included: it reaches no bias."""
    attend = backend_call(backend, device, weights=False)
    p = make(D=16, mask="attn_mask", bias=shape, device=device)
    empty = ~visible(p).any(-1)
    clean = solve(p, attend).dbias
    poisoned = solve(p.but(dlse=p.dlse.masked_fill(empty, torch.nan)), attend).dbias
    assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_gradient_of_lse_where_little_else_is_left(backend: str, seed: int, device: torch.device) -> None:
    """One query that sees one key: dS is dlse, of which dP, the larger one, takes no digits where float32 is exact."""
    one = torch.zeros(1, 1, 2, 2, dtype=torch.bool, device=device)
    one[..., 1, 0] = True
    p = make(B=1, H=1, Lq=2, Lk=2, D=40, mask={"attn_mask": one}, bias=(1, 1, 2, 2), seed=seed, device=device)
    check(p, backend_call(backend, device, weights=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_bias_masks(backend: str, device: torch.device) -> None:
    """-inf in a bias: the entry is masked, a whole row of it sees nothing, and no gradient is NaN."""
    p = make(bias=(2, 1, 21, 37), mask="causal", device=device)
    p.bias[torch.rand(p.bias.shape, device=device) < 0.3] = -torch.inf
    p.bias[1, 0, 3:6] = -torch.inf
    results = check(p, backend_call(backend, device))
    assert not results.dbias[p.bias == -torch.inf].any()


@pytest.mark.parametrize("needs", ["q", "k", "v", "b", "qb", "kv"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_ask_for_a_gradient(backend: str, needs: str, device: torch.device) -> None:
    p = make(B=1, mask="attn_mask", bias=(1, 2, 21, 37), device=device)
    results = solve(p, backend_call(backend, device, weights=False), needs)
    wanted = tuple("d" + {"b": "bias"}.get(n, n) for n in needs)
    assert [name for name in GRADS if getattr(results, name) is not None] == [n for n in GRADS if n in wanted]
    compare(p, results, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_lse_alone_and_of_out_alone(backend: str, device: torch.device) -> None:
    """z-loss: a loss on lse, with and without one on out."""
    p = make(Lq=45, Lk=60, mask="causal", bias=(1, 1, 45, 60), device=device)
    attend = backend_call(backend, device, weights=False)
    check(p.but(dlse=None), attend)
    z_loss = p.but(dout=torch.zeros_like(p.dout))

    def lse_only(q, k, v, mask, dropout_p, scale):
        out, lse, _ = attend(q, k, v, mask, dropout_p, scale)
        return (out * 0).detach() + 0 * lse[..., None], lse, None  # out itself gets no gradient at all

    results = solve(z_loss, lse_only)
    compare(z_loss, results, ("lse", "dq", "dk", "dbias"))
    assert results.dv is None or not results.dv.any()


# How a gradient may arrive: dout of shape (2, 2, 21, 32).
ARRIVALS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:, :, :1, :1].expand_as(t),  # out.sum().backward()
    "expanded over heads": lambda t: t[:, :1].expand_as(t),
    "positions before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1].copy_(t),
    "every second": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
}


@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dout_layouts(backend: str, arrival: str, device: torch.device) -> None:
    p = make(mask="causal", device=device)
    check(p.but(dout=ARRIVALS[arrival](p.dout)), backend_call(backend, device, weights=False))


def _bshd(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _packed(t: Tensor, place: int) -> Tensor:
    """One of three in a packed projection (B, L, 3, H, D)."""
    B, H, L, D = t.shape
    whole = torch.full((B, L, 3, H, D), torch.nan, dtype=t.dtype, device=t.device)
    whole[:, :, place] = t.transpose(1, 2)
    return whole[:, :, place].transpose(1, 2)


def _offset(t: Tensor) -> Tensor:
    """Starts one element into its storage: aligned to its own size only."""
    return torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "positions before heads": lambda q, k, v: (_bshd(q), _bshd(k), _bshd(v)),
    "each its own": lambda q, k, v: (_bshd(q), k, _packed(v, 2)),
    "packed": lambda q, k, v: (q, _packed(k, 1), _packed(v, 2)),
    "head dimension outside": lambda q, k, v: (q.mT.contiguous().mT, k.mT.contiguous().mT, v),
    "offset by one": lambda q, k, v: (_offset(q), _offset(k), _offset(v)),
    "rows of odd length": lambda q, k, v: tuple(torch.cat([t, t[..., :1]], -1)[..., :-1] for t in (q, k, v)),
    "every second key": lambda q, k, v: (q, k.repeat_interleave(2, 2)[:, :, ::2], v.repeat_interleave(2, 2)[:, :, ::2]),
    "one key for all samples": lambda q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
    "one key for all heads": lambda q, k, v: (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)),
    "one value row for all keys": lambda q, k, v: (q, k, v[:, :, :1].expand_as(v)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_input_layouts(backend: str, layout: str, device: torch.device) -> None:
    p = make(mask="decoder", device=device)
    q, k, v = LAYOUTS[layout](p.q, p.k, p.v)
    results = check(p.but(q=q, k=k, v=v), backend_call(backend, device))
    if layout == "positions before heads" and backend in KERNEL_BACKENDS:
        assert results.out.transpose(1, 2).is_contiguous(), "out must follow the layout of q"


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "every second"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_and_bias_layouts(backend: str, layout: str, device: torch.device) -> None:
    """The masks' own strides: stride 0, transposed, a slice that starts on an odd byte."""

    def laid_out(t: Tensor) -> Tensor:
        if layout == "expanded":
            return t[:1, :1, :1].expand_as(t)
        if layout == "transposed":
            return t.mT.contiguous().mT
        if layout == "sliced":
            return torch.cat([t[..., :1], t, t], -1)[..., 1 : t.shape[-1] + 1]
        return t.repeat_interleave(2, -1)[..., ::2]

    p = make(mask="attn_mask", bias=(2, 2, 21, 37), device=device)
    check(
        p.but(mask={"attn_mask": laid_out(p.mask["attn_mask"])}, bias=laid_out(p.bias)), backend_call(backend, device)
    )


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_backward_of_another_rooms_forward(backend: str, device: torch.device) -> None:
    """out and lse mean the same in every backend: a kernel's backward takes the reference's."""
    backend_call(backend, device)
    p = make(H=4, Hk=2, mask="decoder", bias=(1, 4, 1, 37), dropout_p=0.3, device=device)
    torch.manual_seed(p.seed)
    rng_state = philox.draw_rng_state(device)
    mask = AttentionMask(**p.mask, bias=p.bias)
    rest = (mask, p.scale, p.dropout_p, rng_state)
    out, lse, weights = load_backend("attention", "reference").attention(p.q, p.k, p.v, *rest)
    kernels = load_backend("attention", backend)
    grads = kernels.attention_bwd(p.dout, p.dlse, p.q, p.k, p.v, out, lse, *rest, True)
    own = kernels.attention_weights(p.q, p.k, lse, *rest, (range(4),))
    compare(p, Results(out, lse, own, *grads), ("weights", *GRADS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_gradients_are_left_alone(backend: str, device: torch.device) -> None:
    """Neither direction writes into what it was given, and a second backward gives the same again."""
    attend = backend_call(backend, device, weights=False)
    p = make(B=1, mask="decoder", bias=(1, 2, 1, 37), dropout_p=0.2, device=device)
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
def test_weights_never_lose_a_gradient_in_silence(backend: str, device: torch.device) -> None:
    """The gradient through the weights is right, or asking for it is an error: it is not silently zero."""
    backend_call(backend, device)
    p = make(B=1, H=1, Lq=6, Lk=7, D=8, device=device)
    q = p.q.clone().requires_grad_()
    _, weights = scaled_dot_product_attention(q, p.k, p.v, return_weights=True, backend=backend)
    if not weights.requires_grad:
        with pytest.raises(RuntimeError, match="does not require grad"):
            weights.square().sum().backward()
        return
    weights.square().sum().backward()
    P = exact(p).weights
    dS = P * (2 * P - (2 * P * P).sum(-1, keepdim=True))
    assert torch.allclose(q.grad.double(), p.scale * dS @ p.k.double(), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_built_without_grad_serves_training(backend: str, device: torch.device) -> None:
    """A mask whose tiles were prepared under inference_mode, as in validation, then trains."""
    attend = backend_call(backend, device, weights=False)
    p = make(mask={"key_padding": prefix([37, 20], 37).to(device)}, device=device)
    mask = AttentionMask(**p.mask)
    with torch.inference_mode():
        attend(p.q, p.k, p.v, mask, 0.0, p.scale)

    def with_that_mask(q, k, v, _, dropout_p, scale):
        return attend(q, k, v, mask, dropout_p, scale)

    check(p, with_that_mask)
