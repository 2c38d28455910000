"""Attention in every backend: each mask, dtype and shape against float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_checks import (
    BACKENDS,
    KERNEL_BACKENDS,
    LOW_PRECISION,
    backend_call,
    check,
    exact,
    make,
    plain,
    solve,
    visible,
)
from helpers import assert_close_as_torch
from mask_cases import KINDS, mask_kinds, offsets, prefix

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, scaled_dot_product_attention

SDPA = scaled_dot_product_attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_kinds(backend: str, kind: str, device: torch.device) -> None:
    check(make(mask=kind, device=device), backend_call(backend, device))


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("kind", ["causal", "window_bottom_right", "attn_mask", "segments_causal", "everything"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_kinds_16_bit(backend: str, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make(mask=kind, dtype=dtype, device=device, bias=(1, 2, 21, 37)), backend_call(backend, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_mask_kinds_float64(backend: str, kind: str, device: torch.device) -> None:
    """At float64 the allowed error is a few 1e-16: formula and closed-form gradients are the same function."""
    check(
        make(H=4, Hk=2, mask=kind, dtype=torch.float64, device=device, bias=(2, 1, 21, 37)),
        backend_call(backend, device),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_aten_fused_path(kind: str, device: torch.device) -> None:
    """aten hands a call that asks for out alone to PyTorch's fused operator.

    Judged at bfloat16: that operator's float32 gradients are up to 1.4 times the allowed error.
    """
    p = make(H=4, Hk=2, mask=kind, device=device, dtype=torch.bfloat16, dlse=False)

    def attend(q, k, v, mask, dropout_p, scale):
        out = SDPA(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend="aten")
        return out, exact(p).lse, None

    check(p, attend, names=("out", "dq", "dk", "dv"))


# Several tiles each way, in the interpreter 2 by 3, the last of them ragged.
@pytest.mark.parametrize("kind", ["none", "causal", "key_padding_holes", "attn_mask_per_sample", "segments", "decoder"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_tiles(backend: str, kind: str, device: torch.device) -> None:
    check(
        make(B=2, H=1, Lq=70, Lk=140, D=16, mask=kind, device=device, bias=(1, 1, 1, 140)),
        backend_call(backend, device),
    )


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (1, 65), (129, 1), (16, 17), (63, 128), (64, 192), (65, 127), (128, 129)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_at_tile_edges(backend: str, Lq: int, Lk: int, device: torch.device) -> None:
    mask = {"is_causal": True, "align": "bottom_right"} if Lq <= Lk else {"key_padding": prefix([Lk], Lk).to(device)}
    H = 8 if Lq * Lk == 1 else 1  # the plain formula's error on a single score would be a matter of luck
    check(make(B=1, H=H, Lq=Lq, Lk=Lk, D=16, mask=mask, device=device), backend_call(backend, device))


@pytest.mark.parametrize("D", [8, 16, 33, 40, 64, 72, 80, 96, 127, 128, 160, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dims(backend: str, D: int, device: torch.device) -> None:
    check(make(B=1, H=1, Lq=19, Lk=35, D=D, mask="causal", device=device), backend_call(backend, device))


@pytest.mark.parametrize("D, Dv", [(16, 64), (64, 16), (33, 72), (128, 40), (1, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_value_dim_differs(backend: str, D: int, Dv: int, device: torch.device) -> None:
    check(make(B=1, D=D, Dv=Dv, mask="attn_mask", device=device), backend_call(backend, device))


@pytest.mark.parametrize("kind", ["causal", "attn_mask", "key_padding"])
@pytest.mark.parametrize("H, Hk", [(4, 2), (3, 1), (6, 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads(backend: str, H: int, Hk: int, kind: str, device: torch.device) -> None:
    check(make(B=1, H=H, Hk=Hk, Lq=13, Lk=18, D=16, mask=kind, device=device), backend_call(backend, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positional_arguments_of_torch(backend: str, device: torch.device) -> None:
    """The same call as torch.nn.functional.scaled_dot_product_attention, judged by the formula and not by torch."""
    p = make(H=4, Hk=2, mask={"is_causal": True}, device=device)
    backend_call(backend, device)
    arguments, options = (p.q, p.k, p.v, None, 0.0, True), {"scale": p.scale, "enable_gqa": True}
    assert F.scaled_dot_product_attention(*arguments, **options).shape == p.dout.shape  # torch takes this call too
    assert_close_as_torch(SDPA(*arguments, **options, backend=backend), exact(p).out, plain(p).out)
    default = make(H=2, device=device, D=33)
    assert_close_as_torch(
        SDPA(default.q, default.k, default.v, backend=backend), exact(default).out, plain(default).out
    )
    for scale in (0.0, -0.3, 2.5):
        scaled = default.but(scale=scale)
        out = SDPA(scaled.q, scaled.k, scaled.v, scale=scale, backend=backend)
        assert_close_as_torch(out, exact(scaled).out, plain(scaled).out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_causal_together_with_a_mask(backend: str, device: torch.device) -> None:
    backend_call(backend, device)
    p = make(device=device, mask="attn_mask")
    both = p.but(mask={**p.mask, "is_causal": True})
    out = SDPA(p.q, p.k, p.v, p.mask["attn_mask"], is_causal=True, backend=backend)
    assert_close_as_torch(out, exact(both).out, plain(both).out)
    with_bias = make(device=device, bias=(2, 1, 21, 37), mask="causal")
    out = SDPA(p.q, p.k, p.v, with_bias.bias, is_causal=True, backend=backend)
    assert_close_as_torch(out, exact(with_bias).out, plain(with_bias).out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_mask_is_ignored(backend: str, device: torch.device) -> None:
    """Each restriction by itself changes the result; so does a bias."""
    attend = backend_call(backend, device, weights=False)
    free = make(B=1, H=2, device=device)
    unmasked = solve(free, attend, needs="").out
    for kind, kwargs in mask_kinds(*free.shape, device).items():
        p = free.but(mask=kwargs)
        if not visible(p).all():
            assert not torch.allclose(solve(p, attend, needs="").out, unmasked, atol=1e-3), kind
    biased = free.but(bias=torch.randn(1, 1, 1, 37, device=device))
    assert not torch.allclose(solve(biased, attend, needs="").out, unmasked, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_masks_equal_results(backend: str, device: torch.device) -> None:
    """Every way of saying the same mask, to the tolerance of the backend and to the same zeros."""
    backend_call(backend, device)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 5, 4, 0], [5, 6, 7, 0, 0, 0, 0, 0]], device=device)
    real = tokens != 0
    causal = get_subsequent_mask(tokens)
    p = make(B=2, H=2, Lq=8, Lk=8, D=16, device=device, mask={"key_padding": real, "is_causal": True})
    dense = (get_pad_mask(tokens, 0) & causal)[:, None]
    infinite = torch.zeros(2, 1, 8, 8, device=device).masked_fill(~dense, -torch.inf)
    ways = {
        "one object": (AttentionMask(key_padding=real, is_causal=True), False),
        "combined": (AttentionMask(key_padding=real) & AttentionMask(is_causal=True), False),
        "a window": (AttentionMask(key_padding=real, window=(None, 0)), False),
        "bottom right": (AttentionMask(key_padding=real, is_causal=True, align="bottom_right"), False),
        "packed": (AttentionMask(key_padding=real, is_causal=True, cu_seqlens_q=offsets(8).to(device)), False),
        "dense bool": (dense, False),
        "dense bool and is_causal": (get_pad_mask(tokens, 0)[:, None], True),
        "a bias of -inf": (infinite, False),
        "a mask, a bias and is_causal": (AttentionMask(key_padding=real, bias=infinite), True),
    }
    truth, low = exact(p).out, plain(p).out
    for name, (mask, is_causal) in ways.items():
        out = SDPA(p.q, p.k, p.v, mask, is_causal=is_causal, backend=backend)
        assert_close_as_torch(out, truth, low, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bitwise_repeatable(backend: str, device: torch.device) -> None:
    attend = backend_call(backend, device)
    p = make(B=2, H=1, Lq=70, Lk=70, D=16, mask="decoder", bias=(1, 1, 1, 70), dropout_p=0.2, device=device)
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
    assert isinstance(out, torch.Tensor)
    both = SDPA(p.q, p.k, p.v, mask, return_lse=True, return_weights=True, backend=backend)
    assert [t.shape for t in both] == [(1, 1, 5, 8), (1, 1, 5), (1, 1, 5, 6)]
    (with_lse, lse), (with_weights, weights) = (
        SDPA(p.q, p.k, p.v, mask, return_lse=True, backend=backend),
        SDPA(p.q, p.k, p.v, mask, return_weights=True, backend=backend),
    )
    low = plain(p)
    for t in (out, both[0], with_lse, with_weights):
        assert_close_as_torch(t, exact(p).out, low.out)
    assert_close_as_torch(lse, exact(p).lse, low.lse)
    assert_close_as_torch(weights, exact(p).weights, low.weights)
    # With a gradient asked for or not, the numbers are the same.
    training = SDPA(p.q.clone().requires_grad_(), p.k, p.v, mask, backend=backend)
    assert training.requires_grad and torch.equal(training.detach(), out)
