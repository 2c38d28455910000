"""Attention in every backend: each mask, dtype, shape and layout against float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_checks import (
    BACKENDS,
    KERNEL_BACKENDS,
    Problem,
    Results,
    backend_call,
    check,
    compare,
    exact,
    make,
    solve,
    visible,
)
from mask_cases import KINDS, mask_kinds, offsets, prefix
from torch import Tensor

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, scaled_dot_product_attention
from fastattn.backends import load_backend
from fastattn.backends.reference import philox
from fastattn.masks import Layout

SDPA = scaled_dot_product_attention
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
full = pytest.mark.full


# Those that kernels read in different ways; how each kind is prepared for them is what tests/masks/test_attention_mask.py compares.
EVERYDAY_KINDS = (
    *("none", "causal_bottom_right", "window", "key_padding_holes", "query_padding_shared", "attn_mask"),
    *("attn_mask_per_sample", "attn_mask_queries", "segments_causal", "segments_and_padding", "decoder", "everything"),
)


def among_all(kind: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """A problem of several tiles each way, the last of them ragged, in which grouped heads, a bias and dropout take
    turns beside the mask."""
    turn = KINDS.index(kind)
    bias = (None, (1, 2, 66, 140), None, (2, 1, 1, 140))[turn % 4]
    options: dict[str, Any] = {"Hk": 1 if turn % 3 == 0 else 2, "bias": bias, "dropout_p": (0.0, 0.3, 0.1)[turn % 3]}
    return make(B=2, H=2, Lq=66, Lk=140, D=16, Dv=24, mask=kind, dtype=dtype, device=device, **options)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        pytest.param(kind, dtype, marks=() if kind in EVERYDAY_KINDS and turn % 3 == place else full)
        for turn, kind in enumerate(KINDS)
        for place, dtype in enumerate(DTYPES)
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_kinds(backend: str, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(among_all(kind, dtype, device), backend_call(backend, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_mask_kinds_float64(backend: str, kind: str, device: torch.device) -> None:
    """At float64 the allowed error is a few 1e-16: formula and closed-form gradients are the same function."""
    p = make(H=4, Hk=2, mask=kind, dtype=torch.float64, device=device, bias=(2, 1, 21, 37))
    check(p, backend_call(backend, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_aten_fused_path(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """aten hands a call that asks for out alone to PyTorch's fused operator."""
    p = make(H=4, Hk=2, mask=kind, device=device, dtype=dtype, dlse=False)

    def attend(q, k, v, mask, dropout_p, scale):
        out = SDPA(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend="aten")
        return out, exact(p).lse, None

    check(p, attend, names=("out", "dq", "dk", "dv"))


FROM_THE_END = {"is_causal": True, "align": "bottom_right"}
SHAPES: dict[str, dict[str, Any]] = {
    # lengths, at the edges of tiles
    "one by one": {"Lq": 1, "Lk": 1},
    "one query": {"Lq": 1, "Lk": 129, "mask": FROM_THE_END},
    "one key": {"Lq": 129, "Lk": 1},
    "whole tiles": {"Lq": 64, "Lk": 128, "mask": FROM_THE_END},
    "one over": {"Lq": 65, "Lk": 129, "mask": FROM_THE_END},
    "one short": {"Lq": 63, "Lk": 127, "mask": FROM_THE_END},
    # head dimensions: of q and k, and of v
    "D 1, Dv 3": {"D": 1, "Dv": 3},
    "D 8": {"D": 8},
    "D 33, Dv 72": {"D": 33, "Dv": 72},
    "D 64, Dv 16": {"D": 64, "Dv": 16},
    "D 80": {"D": 80},
    "D 127": {"D": 127},
    "D 128, Dv 40": {"D": 128, "Dv": 40},
    "D 160": {"D": 160},
    "D 256": {"D": 256},
    # heads that share a key head
    "groups of 3": {"H": 3, "Hk": 1, "mask": "attn_mask"},
    "groups of 3 of 6": {"H": 6, "Hk": 2, "mask": "key_padding"},
}
EVERYDAY_SHAPES = ("one by one", "one over", "D 33, Dv 72", "D 128, Dv 40", "groups of 3")


@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param(shape, dtype, marks=() if shape in EVERYDAY_SHAPES and dtype == torch.float32 else full)
        for shape in SHAPES
        for dtype in DTYPES
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(backend: str, shape: str, dtype: torch.dtype, device: torch.device) -> None:
    options = {"B": 1, "H": 1, "Lq": 19, "Lk": 35, "D": 16, "mask": "causal", **SHAPES[shape]}
    check(make(**options, dtype=dtype, device=device), backend_call(backend, device))


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
    "head dimension outside": lambda q, k, v: (q.mT.contiguous().mT, k.mT.contiguous().mT, v),
    "offset by one": lambda q, k, v: (_offset(q), _offset(k), _offset(v)),
    "rows of odd length": lambda q, k, v: tuple(torch.cat([t, t[..., :1]], -1)[..., :-1] for t in (q, k, v)),
    "every second key": lambda q, k, v: (q, k.repeat_interleave(2, 2)[:, :, ::2], v.repeat_interleave(2, 2)[:, :, ::2]),
    "one key for all samples": lambda q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
    "one value row for all keys": lambda q, k, v: (q, k, v[:, :, :1].expand_as(v)),
}
# How a gradient may arrive.
ARRIVALS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:, :, :1, :1].expand_as(t),  # out.sum().backward()
    "expanded over heads": lambda t: t[:, :1].expand_as(t),
    "positions before heads": _bshd,
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1].copy_(t),
    "every second": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
}
# The strides of masks and biases: 0, transposed, a slice that starts on an odd byte.
MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:1, :1, :1].expand_as(t),
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.cat([t[..., :1], t, t], -1)[..., 1 : t.shape[-1] + 1],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize(
    "inputs, dout, mask",
    [
        ("positions before heads", "expanded", "expanded"),
        ("each its own", "transposed", "sliced"),
        pytest.param("head dimension outside", "sliced", "transposed", marks=full),
        ("offset by one", "every second", "every second"),
        pytest.param("rows of odd length", "expanded over heads", "sliced", marks=full),
        pytest.param("every second key", "positions before heads", "transposed", marks=full),
        pytest.param("one key for all samples", "expanded", "expanded", marks=full),
        pytest.param("one value row for all keys", "sliced", "every second", marks=full),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts(backend: str, inputs: str, dout: str, mask: str, device: torch.device) -> None:
    p = make(B=2, H=2, Lq=21, Lk=37, D=16, mask="attn_mask", bias=(2, 2, 21, 37), device=device)
    q, k, v = LAYOUTS[inputs](p.q, p.k, p.v)
    given = {"q": q, "k": k, "v": v, "dout": ARRIVALS[dout](p.dout), "bias": MASK_LAYOUTS[mask](p.bias)}
    p = p.but(**given, mask={"attn_mask": MASK_LAYOUTS[mask](p.mask["attn_mask"])})
    results = check(p, backend_call(backend, device))
    if inputs == "positions before heads" and backend in KERNEL_BACKENDS:
        assert results.out.transpose(1, 2).is_contiguous(), "out must follow the layout of q"


def out_of(p: Problem, *arguments: Any, **options: Any) -> None:
    """Judge the out of a call of the public op."""
    out = SDPA(p.q, p.k, p.v, *arguments, **options)
    compare(p, Results(out, *[None] * 6), ("out",))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_as_of_torch(backend: str, device: torch.device) -> None:
    """The same arguments as torch.nn.functional.scaled_dot_product_attention, judged by the formula and not by torch;
    and is_causal beside a mask or a bias, which torch refuses."""
    backend_call(backend, device)
    p = make(H=4, Hk=2, D=16, mask={"is_causal": True}, device=device)
    options = {"scale": p.scale, "enable_gqa": True}
    assert F.scaled_dot_product_attention(p.q, p.k, p.v, None, 0.0, True, **options).shape == p.dout.shape
    out_of(p, None, 0.0, True, **options, backend=backend)
    out_of(make(D=33, device=device), backend=backend)
    for scale in (0.0, -0.3, 2.5):
        out_of(make(D=16, device=device).but(scale=scale), scale=scale, backend=backend)
    p = make(D=16, device=device, mask="attn_mask")
    out_of(p.but(mask={**p.mask, "is_causal": True}), p.mask["attn_mask"], is_causal=True, backend=backend)
    p = make(D=16, device=device, bias=(2, 1, 21, 37), mask="causal")
    out_of(p, p.bias, is_causal=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_mask_is_ignored(backend: str, device: torch.device) -> None:
    """Each restriction by itself changes the result; so does a bias."""
    attend = backend_call(backend, device, weights=False)
    free = make(B=1, H=2, D=16, device=device)
    unmasked = solve(free, attend, needs="").out
    for kind, kwargs in mask_kinds(*free.shape, device).items():
        p = free.but(mask=kwargs)
        if not visible(p).all():
            assert not torch.allclose(solve(p, attend, needs="").out, unmasked, atol=1e-3), kind
    biased = free.but(bias=torch.randn(1, 1, 1, 37, device=device))
    assert not torch.allclose(solve(biased, attend, needs="").out, unmasked, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_masks_equal_results(backend: str, device: torch.device) -> None:
    """Every way of saying the same mask."""
    backend_call(backend, device)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 5, 4, 0], [5, 6, 7, 0, 0, 0, 0, 0]], device=device)
    real = tokens != 0
    causal = get_subsequent_mask(tokens)
    p = make(B=2, H=2, Lq=8, Lk=8, D=16, device=device, mask={"key_padding": real, "is_causal": True})
    dense = (get_pad_mask(tokens, 0) & causal)[:, None]
    infinite = torch.zeros(2, 1, 8, 8, device=device).masked_fill(~dense, -torch.inf)
    for mask, is_causal in (
        (AttentionMask(key_padding=real, is_causal=True), False),
        (AttentionMask(key_padding=real) & AttentionMask(is_causal=True), False),
        (AttentionMask(key_padding=real, window=(None, 0)), False),
        (AttentionMask(key_padding=real, is_causal=True, align="bottom_right"), False),
        (AttentionMask(key_padding=real, is_causal=True, cu_seqlens_q=offsets(8).to(device)), False),
        (dense, False),
        (get_pad_mask(tokens, 0)[:, None], True),
        (infinite, False),
        (AttentionMask(key_padding=real, bias=infinite), True),
    ):
        out_of(p, mask, is_causal=is_causal, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bitwise_repeatable(backend: str, device: torch.device) -> None:
    attend = backend_call(backend, device)
    p = make(B=2, H=1, Lq=20, Lk=70, D=16, mask="decoder", bias=(1, 1, 1, 70), dropout_p=0.2, device=device)
    first = solve(p, attend)
    for _ in range(1 if device.type == "cpu" else 30):
        for name, a, b in zip(first._fields, first, solve(p, attend), strict=True):
            assert torch.equal(a, b), f"{name} differs from one run to the next"


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_a_sample_does_not_depend_on_its_batch(backend: str, device: torch.device) -> None:
    """Bit for bit: alone or in a batch; and with more padding behind it."""
    attend = backend_call(backend, device)
    p = make(B=3, H=1, Lq=20, Lk=40, D=16, device=device, mask={"key_padding": prefix([40, 9, 23], 40).to(device)})
    whole = solve(p, attend)
    for b in range(3):
        one = {name: getattr(p, name)[b : b + 1] for name in ("q", "k", "v", "dout", "dlse")}
        alone = solve(p.but(**one, mask={"key_padding": p.mask["key_padding"][b : b + 1]}), attend)
        for name in ("out", "lse", "weights", "dq", "dk", "dv"):
            assert torch.equal(getattr(alone, name), getattr(whole, name)[b : b + 1]), name
    longer = {name: F.pad(getattr(p, name), (0, 0, 0, 50)) for name in ("k", "v")}
    padded = solve(p.but(**longer, mask={"key_padding": F.pad(p.mask["key_padding"], (0, 50))}), attend)
    assert torch.equal(padded.out, whole.out) and torch.equal(padded.dq, whole.dq)
    assert torch.equal(padded.dk[:, :, :40], whole.dk) and not padded.dk[:, :, 40:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_returned(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(B=1, H=1, Lq=5, Lk=6, D=8, device=device, mask="causal")
    mask = AttentionMask(**p.mask)
    out = SDPA(p.q, p.k, p.v, mask, backend=backend)
    (with_lse, lse), (with_weights, weights) = (
        SDPA(p.q, p.k, p.v, mask, **wanted, backend=backend)
        for wanted in ({"return_lse": True}, {"return_weights": True})
    )
    both = SDPA(p.q, p.k, p.v, mask, return_lse=True, return_weights=True, backend=backend)
    for results in ((out, lse, weights), (with_lse, lse, weights), (with_weights, *both[1:]), both):
        compare(p, Results(*results, *[None] * 4), ("out", "lse", "weights"))
    # With a gradient asked for or not, the numbers are the same.
    training = SDPA(p.q.clone().requires_grad_(), p.k, p.v, mask, backend=backend)
    assert training.requires_grad and torch.equal(training.detach(), out)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_backward_of_another_backends_forward(backend: str, device: torch.device) -> None:
    """out and lse mean the same in every backend: a kernel's backward takes the reference's."""
    backend_call(backend, device)
    p = make(H=4, Hk=2, D=16, mask="decoder", bias=(1, 4, 1, 37), dropout_p=0.3, device=device)
    torch.manual_seed(p.seed)
    options = (p.scale, p.dropout_p, philox.draw_rng_state(device))
    mask = AttentionMask(**p.mask, bias=p.bias)
    out, lse, _ = load_backend("attention", "reference").attention(p.q, p.k, p.v, mask, *options)
    kernels = load_backend("attention", backend)
    layouts = (*kernels.mask_layouts(p.q, p.k, p.v, p.bias)[1:], Layout())
    *masks, plain_mask = (mask.prepare(21, 37, layout, device) for layout in layouts)
    grads = kernels.attention_bwd(p.dout, p.dlse, p.q, p.k, p.v, out, lse, p.bias, tuple(masks), *options, True)
    weights = kernels.attention_weights(p.q, p.k, lse, p.bias, plain_mask, *options, False)
    compare(p, Results(out, lse, weights, *grads))
