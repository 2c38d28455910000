"""Attention in every backend: each mask, dtype, shape and bias against float64, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_checks import (
    BACKENDS,
    BIAS_BACKENDS,
    BIAS_KERNELS,
    KERNEL_BACKENDS,
    Problem,
    Results,
    backend_call,
    check,
    compare,
    make,
    plain,
    served,
    solve,
)
from mask_cases import KINDS, offsets, prefix

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, scaled_dot_product_attention
from fastattn.backends import attention_rows, load_backend
from fastattn.backends.calls import AttentionCall
from fastattn.backends.reference import philox

SDPA = scaled_dot_product_attention
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
full = pytest.mark.full


# Kernels read each of these in another way. How a mask is prepared for them: tests/masks/test_attention_mask.py.
EVERYDAY_KINDS = (
    *("none", "causal_bottom_right", "window", "key_padding_holes", "query_padding_shared", "attn_mask"),
    *("attn_mask_per_sample", "segments_causal", "segments_and_padding", "decoder", "everything"),
)


def among_all(kind: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """A problem of several tiles each way, the last of them ragged. With one kind of mask comes a bias, with the next
    dropout, and so on."""
    turn = KINDS.index(kind)
    bias = (None, (1, 2, 66, 140), None, (2, 1, 1, 140))[turn % 4]
    options: dict[str, Any] = {"Hk": 1 if turn % 3 == 0 else 2, "bias": bias, "dropout_p": (0.0, 0.3, 0.1)[turn % 3]}
    options |= {"dtype": dtype, "device": device, "common": 1.0}
    return make(B=2, H=2, Lq=66, Lk=140, D=16, Dv=24, mask=kind, **options)


@pytest.mark.few(4)
@pytest.mark.bug_class("T9", "T11", "T12", "T14", "T25")
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
    check(served(among_all(kind, dtype, device), backend), backend_call(backend, device))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERYDAY_KINDS[::6] else full) for kind in KINDS]
)
@pytest.mark.parametrize("backend", ["triton"])
def test_mask_kinds_of_one_tile(backend: str, kind: str, device: torch.device) -> None:
    """All keys in one tile, the queries in several: one kernel makes dq, dk and dv."""
    turn = KINDS.index(kind)
    bias = (None, (1, 4, 70, 29), None, (2, 1, 1, 29))[turn % 4]
    options: dict[str, Any] = {"Hk": 2, "bias": bias, "dropout_p": (0.3, 0.0)[turn // 2 % 2], "dtype": DTYPES[turn % 3]}
    check(make(H=4, Lq=70, Lk=29, D=24, Dv=16, mask=kind, device=device, **options), backend_call(backend, device))


@pytest.mark.few(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_mask_kinds_float64(backend: str, kind: str, device: torch.device) -> None:
    """At float64 the allowed error is a few 1e-16: formula and closed-form gradients are the same function."""
    p = make(H=4, Hk=2, mask=kind, dtype=torch.float64, device=device, bias=(2, 1, 21, 37))
    check(p, backend_call(backend, device))


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_aten_fused_path(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """aten passes a call that needs out alone to PyTorch's fused operator."""
    p = make(H=4, Hk=2, mask=kind, device=device, dtype=dtype, dlse=False)

    def attend(q, k, v, mask, dropout_p, scale):
        out = SDPA(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True, backend="aten")
        return out, plain(p.map(torch.Tensor.double)).lse, None

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


@pytest.mark.bug_class("T5", "T13")
@pytest.mark.parametrize(
    "backend, shape, dtype",
    [
        pytest.param(backend, shape, dtype, marks=() if shape in EVERYDAY_SHAPES and dtype == torch.float32 else full)
        for backend, shape, dtype in itertools.product(BACKENDS, SHAPES, DTYPES)
        if backend != "cuda" or SHAPES[shape].get("D", 0) <= 128
    ],
)
def test_shapes(backend: str, shape: str, dtype: torch.dtype, device: torch.device) -> None:
    options = {"B": 1, "H": 1, "Lq": 19, "Lk": 35, "D": 16, "mask": "causal", **SHAPES[shape]}
    check(make(**options, dtype=dtype, device=device), backend_call(backend, device))


def out_of(p: Problem, *arguments: Any, **options: Any) -> None:
    """Judge the out of a call of the public op."""
    out = SDPA(p.q, p.k, p.v, *arguments, **options)
    compare(p, Results(out, *[None] * 6), ("out",))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_as_of_torch(backend: str, device: torch.device) -> None:
    """The same arguments as torch.nn.functional.scaled_dot_product_attention, judged by the formula and not by torch;
    and is_causal together with a mask or a bias, which torch documents as an error."""
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
    p = served(make(D=16, device=device, bias=(2, 1, 21, 37), mask="causal"), backend)
    out_of(p, p.bias, is_causal=True, backend=backend)


@pytest.mark.bug_class("T25")
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
    biased = [(infinite, False), (AttentionMask(key_padding=real, bias=infinite), True)]
    for mask, is_causal in (
        (AttentionMask(key_padding=real, is_causal=True), False),
        (AttentionMask(key_padding=real) & AttentionMask(is_causal=True), False),
        (AttentionMask(key_padding=real, window=(None, 0)), False),
        (AttentionMask(key_padding=real, is_causal=True, align="bottom_right"), False),
        (AttentionMask(key_padding=real, is_causal=True, cu_seqlens_q=offsets(8).to(device)), False),
        (dense, False),
        (get_pad_mask(tokens, 0)[:, None], True),
        *(biased if backend in BIAS_BACKENDS else []),
    ):
        out_of(p, mask, is_causal=is_causal, backend=backend)


@pytest.mark.bug_class("T24")
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_a_sample_does_not_depend_on_its_batch(backend: str, device: torch.device) -> None:
    """Bit for bit: alone or in a batch; and with more padding after it."""
    attend = backend_call(backend, device)
    p = make(B=3, H=1, Lq=20, Lk=40, D=16, device=device, mask={"key_padding": prefix([40, 9, 23], 40).to(device)})
    whole = solve(p, attend)
    for b in range(3):
        one = {name: getattr(p, name)[b : b + 1] for name in ("q", "k", "v", "dout", "dlse")}
        alone = solve(p.but(**one, mask={"key_padding": p.mask["key_padding"][b : b + 1]}), attend)
        for name in ("out", "lse", "dq", "dk", "dv"):
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
    # With a gradient or without, the numbers are the same.
    training = SDPA(p.q.clone().requires_grad_(), p.k, p.v, mask, backend=backend)
    assert training.requires_grad and torch.equal(training.detach(), out)


@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_backward_of_another_backends_forward(backend: str, device: torch.device) -> None:
    """out and lse mean the same in every backend: a kernel's backward takes the reference's."""
    backend_call(backend, device)
    p = served(make(H=4, Hk=2, D=16, mask="decoder", bias=(1, 4, 1, 37), dropout_p=0.3, device=device), backend)
    torch.manual_seed(p.seed)
    options = (p.scale, p.dropout_p, philox.draw_rng_state(device))
    mask = AttentionMask(**p.mask, bias=p.bias)
    out, lse, _ = load_backend("attention", "reference").attention(p.q, p.k, p.v, mask, *options)
    kernels = load_backend("attention", backend)
    layouts = kernels.mask_layouts(p.q, p.k, p.v, p.bias)[1:]
    scale, dropout_p, rng_state = options
    masks = mask.prepare_all(21, 37, layouts, device)
    call = AttentionCall(p.q, p.k, p.v, p.bias, rng_state, masks, scale, dropout_p)
    grads = kernels.attention_bwd(p.dout, p.dlse, call, out, lse, p.bias is not None)
    compare(p, Results(out, lse, None, *grads))


@pytest.mark.few(1)
@pytest.mark.parametrize("dropout_p", [pytest.param(0.0, marks=full), 0.3])
@pytest.mark.parametrize("reads_memory", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("backend", KERNEL_BACKENDS)
def test_attention_of_rows(backend: str, reads_memory: bool, dropout_p: float, device: torch.device) -> None:
    """It gives what the kernels give with heads, in launches that share `bound`, in aligned memory or not."""
    backend_call(backend, device)
    kernels, bound, sizes = load_backend("attention", backend), {}, (2, 19, 4, 2, 16, 32)
    B, L, H, Hk, Dk, Dv = sizes
    width = H * Dk + (0 if reads_memory else Hk * (Dk + Dv))
    Lk = 37 if reads_memory else L
    shapes = (B * L, width), *[(B, Lk, Hk * d) for d in (Dk, Dv) if reads_memory], (B * L, H * Dv)
    generator = torch.Generator().manual_seed(0)
    mask = AttentionMask(key_padding=torch.arange(Lk, device=device) < torch.tensor([[Lk], [11]], device=device))
    for seed in (0, 1, 2):
        given = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        if seed == 1:  # no address of 16 bytes
            given = [torch.empty(t.numel() + 1, device=device)[1:].view(t.shape).copy_(t) for t in given]
        projected, *memory, dout = given
        q, k, v = attention_rows.heads(projected, memory, sizes)
        first, *rest = (mask.prepare(L, Lk, layout, device) for layout in kernels.mask_layouts(q, k, v, None))
        options = 0.25, dropout_p, torch.tensor([seed, 7], device=device) if dropout_p else None
        out, lse = kernels.attention_rows_fwd(projected, memory, sizes, first, *options, bound)
        dprojected, *dmemory = grads = [torch.full_like(t, torch.nan) for t in given[:-1]]
        call = dout, projected, memory, out, lse, dprojected, dmemory, sizes, tuple(rest)
        kernels.attention_rows_bwd(*call, *options, bound)
        heads_call = AttentionCall(q, k, v, None, options[2], [first], *options[:2])
        expected, expected_lse = kernels.attention_fwd(heads_call)
        d_expected, heads_call = dout.view(B, L, H, Dv).transpose(1, 2), heads_call._replace(masks=rest)
        dheads = kernels.attention_bwd(d_expected, None, heads_call, expected, expected_lse, False)
        assert torch.equal(out, expected.transpose(1, 2).reshape(B * L, -1)) and torch.equal(lse, expected_lse)
        for actual, expected in zip(attention_rows.heads(dprojected, dmemory, sizes), dheads[:3], strict=True):
            assert torch.equal(actual, expected)
        assert not any(t.isnan().any() for t in grads)
    backward = {"dq", "dkv"} if reads_memory else {"short"}
    assert bound.keys() == ({"forward"} | backward if backend == "triton" else set())


@pytest.mark.bug_class("T3")
@pytest.mark.parametrize("backend", ["triton"])
def test_backward_into_given_memory(backend: str, device: torch.device) -> None:
    """dq, dk and dv are written into views of one tensor, bit for bit as into their own memory."""
    backend_call(backend, device)
    p = make(H=2, D=16, Lq=37, mask="key_padding_holes", device=device)
    kernels, mask = load_backend("attention", backend), AttentionMask(**p.mask)
    masks = mask.prepare_all(37, 37, kernels.mask_layouts(p.q, p.k, p.v, None), device)
    call = AttentionCall(p.q, p.k, p.v, None, None, masks, p.scale)
    out, lse = kernels.attention_fwd(call)
    given = (p.dout, p.dlse, call._replace(masks=masks[1:]), out, lse, False)
    B, H, L, D = p.q.shape
    grads = torch.empty(B, L, 3, H, D, dtype=p.q.dtype, device=device).permute(2, 0, 3, 1, 4).unbind(0)
    *found, _ = kernels.attention_bwd(*given, grads)
    *expected, _ = kernels.attention_bwd(*given)
    for memory, a, b in zip(grads, found, expected, strict=True):
        assert a is memory and torch.equal(a, b)


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
    "float32 with bfloat16": {**SHORT, "bias": (1, 4, 21, 37), "dtype": torch.bfloat16, "bias_dtype": torch.float32},
    "float32 with float16": {**SHORT, "bias": (1, 1, 21, 37), "dtype": torch.float16, "bias_dtype": torch.float32},
    "long, of keys": {**LONG, "bias": (1, 1, 1, 140)},
    "long, shared": {**LONG, "bias": (1, 1, 70, 140)},
}
EVERYDAY_BIASES = ("(2, 1, 21, 1)", "float32 with bfloat16", "long, of keys", "long, shared")


@pytest.mark.few(3)
@pytest.mark.bug_class("T4", "T20")
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERYDAY_BIASES else full) for c in BIASES])
@pytest.mark.parametrize("backend", BIAS_BACKENDS)
def test_bias(backend: str, case: str, device: torch.device) -> None:
    check(make(D=16, **BIASES[case], device=device), backend_call(backend, device, weights=False))


# Of one program, so that its loop over the batch is split.
SPLIT_BIASES: dict[str, dict[str, Any]] = {
    "of a matrix": {"H": 1, "bias": (1, 1, 21, 30), "mask": "decoder"},
    "of heads": {"H": 2, "bias": (1, 1, 21, 30), "mask": "key_padding_holes", "dtype": torch.bfloat16},
    "of keys": {"H": 2, "Lq": 70, "bias": (1, 1, 1, 30), "mask": "key_padding_holes", "dtype": torch.float16},
}


@pytest.mark.few(1)
@pytest.mark.bug_class("T8")
@pytest.mark.parametrize("case", ["of a matrix", *(pytest.param(case, marks=full) for case in ("of heads", "of keys"))])
@pytest.mark.parametrize("backend", BIAS_KERNELS)
def test_bias_of_a_split_batch(backend: str, case: str, device: torch.device) -> None:
    """Parts of several sizes, added up: as right as one sum, and bit for bit the same again."""
    B = 9 if device.type == "cpu" else 301  # two or four parts; on a large GPU pairs, and one sample that is left
    p = make(**{"B": B, "Lq": 21, "Lk": 30, "D": 16, "dropout_p": 0.3, "device": device, **SPLIT_BIASES[case]})
    attend = backend_call(backend, device, weights=False)
    assert torch.equal(check(p, attend).dbias, solve(p, attend).dbias)


# Of sequences of 40, 30, 1 and 79 positions, and of others, packed in 150.
PACKED, ONE = {"cu_seqlens_q": offsets(40, 30, 1, 79)}, {"B": 1, "H": 1}
RELATIVE: dict[str, dict[str, Any]] = {
    "one tile": {"Lq": 21, "Lk": 30, "relative_bias": (1, 50), "softcap": 1.5, "dropout_p": 0.3, "Hk": 1},
    "neighbours": {**ONE, "Lq": 70, "Lk": 75, "relative_bias": (1, 144), "mask": {"window": (66, 3)}, "softcap": 20.0},
    "packed": {**ONE, "Lq": 75, "Lk": 75, "relative_bias": (1, 79), "mask": {"cu_seqlens_q": offsets(40, 1, 34)}},
    "softcap": {"softcap": 50.0, "mask": "causal", "dtype": torch.bfloat16},
    # The others are of the full tier: lengths at the edges of tiles, and packed ones.
    **{
        f"{Lq} by {Lk}, {mask}": {"B": 1, "Lq": Lq, "Lk": Lk, "relative_bias": (2, Lq + Lk - 1), "mask": mask}
        for Lq, Lk in ((64, 64), (65, 129), (129, 65), (128, 63), (1, 130), (130, 1), (1, 1))
        for mask in ("none", "causal_bottom_right")
    },
    **{
        f"packed, {name}": {"B": 1, "Lq": 150, "Lk": 150, "relative_bias": (heads, 157), "mask": PACKED | mask}
        | options
        for name, heads, mask, options in (
            ("causal", 1, {"is_causal": True}, {"dtype": torch.float16, "softcap": 5.0}),
            ("window", 2, {"window": (3, 9)}, {"dropout_p": 0.3}),
            ("padding", 4, {"key_padding": prefix([140], 150)}, {"H": 4, "Hk": 2}),
            ("matrix", 1, {"attn_mask": torch.ones(150, 150).tril(7).bool()}, {"dtype": torch.bfloat16}),
        )
    },
    "packed, one sequence": {
        "B": 1,
        "Lq": 70,
        "Lk": 70,
        "relative_bias": (2, 139),
        "mask": {"cu_seqlens_q": offsets(70)},
    },
    "float32 with bfloat16": {"relative_bias": (2, 57), "dtype": torch.bfloat16, "bias_dtype": torch.float32},
    "softcap and a bias": {"softcap": 1.0, "bias": (1, 2, 21, 37), "mask": "key_padding_holes"},
    **{
        f"softcap {cap} of {dtype}": {"Lk": keys, "softcap": cap, "dtype": dtype, "mask": "causal", "dropout_p": 0.3}
        for cap, keys in ((0.1, 37), (2.0, 30), (30.0, 140), (1e4, 37))
        for dtype in DTYPES
    },
}
EVERYDAY_RELATIVE = ("one tile", "neighbours", "packed", "softcap")


@pytest.mark.few(6)
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERYDAY_RELATIVE else full) for c in RELATIVE])
@pytest.mark.parametrize("backend", BIAS_BACKENDS)
def test_relative_bias_and_softcap(backend: str, case: str, device: torch.device) -> None:
    """As right as the formula, and in the kernels the gradient of the bias is the same bit for bit again."""
    p = make(**{"D": 16, "device": device, **RELATIVE[case]})
    attend = backend_call(backend, device)
    results = check(p, attend)
    if case in ("neighbours", "packed, causal") and backend in BIAS_KERNELS:
        assert torch.equal(results.dbias, solve(p, attend).dbias)


@full
@pytest.mark.parametrize("backend", BIAS_KERNELS)
def test_relative_bias_of_many_samples(backend: str, device: torch.device) -> None:
    """Of few programs, so that their loop over samples and heads is split; and a bias without a gradient."""
    B = 9 if device.type == "cpu" else 301
    p = make(B=B, Lq=21, Lk=20, D=16, relative_bias=(1, 40), mask="key_padding_holes", device=device)
    attend = backend_call(backend, device, weights=False)
    results = check(p, attend)
    assert torch.equal(results.dbias, solve(p, attend).dbias)
    without = solve(p, attend, needs="qkv")
    assert without.dbias is None and torch.equal(without.dq, results.dq)


@pytest.mark.parametrize("shape", [(21, 37), (21, 1)], ids=str)
@pytest.mark.parametrize("backend", BIAS_BACKENDS)
def test_bias_as_torch_takes_it(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Two dimensions: dbias has the shape that was given."""
    attend = backend_call(backend, device, weights=False)
    p = make(D=16, mask="attn_mask", bias=shape, device=device)
    bias = p.bias.clone().requires_grad_()
    out, lse, _ = attend(p.q, p.k, p.v, AttentionMask(**p.mask, bias=bias), 0.0, p.scale)
    torch.autograd.backward((out, lse), (p.dout, p.dlse))
    actual = Results(out.detach(), lse.detach(), None, None, None, None, bias.grad[None, None])
    compare(p.but(bias=p.bias[None, None]), actual, ("out", "lse", "dbias"))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BIAS_KERNELS)
def test_bias_of_whole_rows_changes_no_weight(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """It moves lse alone, so out gives it exactly the gradient 0: what rounds on the way must not show."""
    attend = backend_call(backend, device, weights=False)
    for shape in ((2, 2, 21, 1), (1, 1, 1, 1)):
        p = make(D=16, dtype=dtype, mask="attn_mask", bias=shape, dropout_p=0.3, dlse=False, device=device)
        assert not solve(p, attend, needs="b").dbias.any()


@pytest.mark.bug_class("T9")
@pytest.mark.parametrize("backend", BIAS_BACKENDS)
def test_infinite_bias_masks(backend: str, device: torch.device) -> None:
    """-inf in a bias: the entry is masked, a whole row of it may attend to nothing, and no gradient is NaN."""
    p = make(D=16, bias=(2, 1, 21, 37), mask="causal", device=device)
    p.bias[torch.rand(p.bias.shape, device=device) < 0.3] = -torch.inf
    p.bias[1, 0, 3:6] = -torch.inf
    results = check(p, backend_call(backend, device))
    assert not results.dbias[p.bias == -torch.inf].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_lse_alone_and_of_out_alone(backend: str, device: torch.device) -> None:
    """z-loss: a loss on lse, with and without one on out."""
    p = served(make(Lq=45, Lk=60, D=16, mask="causal", bias=(1, 1, 45, 60), device=device), backend)
    attend = backend_call(backend, device, weights=False)
    check(p.but(dlse=None), attend)
    z_loss = p.but(dout=torch.zeros_like(p.dout))

    def lse_only(q, k, v, mask, dropout_p, scale):
        out, lse, _ = attend(q, k, v, mask, dropout_p, scale)
        return (out * 0).detach() + 0 * lse[..., None], lse, None  # out itself gets no gradient at all

    results = solve(z_loss, lse_only)
    compare(z_loss, results, ("lse", "dq", "dk", *(["dbias"] if p.bias is not None else [])))
    assert results.dv is None or not results.dv.any()
