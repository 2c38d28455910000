"""The CUDA attention's forward and weights: on the CPU through csrc/host, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from attention_checks import Problem, Results, backend_call, compare, exact, make, plain, solve
from helpers import assert_close_as_torch, round_tf32
from host_build import COMPLETIONS, ORDERS
from mask_cases import HIDING, KINDS, packed_and_padded, prefix
from torch import Tensor

from fastattn import AttentionMask, explain
from fastattn import scaled_dot_product_attention as SDPA
from fastattn.cuda import _visibility
from fastattn.cuda import attention as backend

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16


def check(p: Problem, device: torch.device) -> Results:
    actual = solve(p, backend_call("cuda", device), needs="")
    compare(p, actual, ("out", "lse", "weights"))
    return actual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_mask_kinds(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make(mask=kind, dtype=dtype, device=device), device)


@pytest.mark.parametrize(
    "kind", ["none", "causal", "window_bottom_right", "attn_mask", "segments_causal", "everything"]
)
@pytest.mark.parametrize(
    "dtype, bias_dtype", [(BFLOAT16, FLOAT32), (FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (FLOAT32, BFLOAT16)]
)
def test_bias_and_dropout(kind: str, dtype: torch.dtype, bias_dtype: torch.dtype, device: torch.device) -> None:
    p = make(mask=kind, dtype=dtype, device=device, bias=(1, 2, 21, 37), bias_dtype=bias_dtype, dropout_p=0.3)
    check(p, device)


# Several tiles each way, the last of them ragged, some of them full.
@pytest.mark.parametrize("kind", ["none", "causal", "window", "key_padding_holes", "segments", "decoder"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_several_tiles(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make(B=2, H=1, Lq=70, Lk=140, D=16, mask=kind, dtype=dtype, bias=(1, 1, 1, 140), device=device), device)
    check(make(B=1, H=2, Lq=200, Lk=270, D=64, mask=kind, dtype=dtype, dropout_p=0.1, device=device), device)


LENGTHS = [(1, 1), (1, 65), (129, 1), (16, 17), (64, 192), (65, 127), (128, 129), (17, 64), (127, 100), (128, 128)]


@pytest.mark.parametrize("Lq, Lk", LENGTHS)
def test_lengths_at_tile_edges(Lq: int, Lk: int, device: torch.device) -> None:
    mask = {"is_causal": True, "align": "bottom_right"} if Lq <= Lk else {"key_padding": prefix([Lk], Lk).to(device)}
    check(make(B=1, H=8 if Lq * Lk == 1 else 1, Lq=Lq, Lk=Lk, D=16, dtype=BFLOAT16, mask=mask, device=device), device)


SHORT_KINDS = ["none", "window", "key_padding", "key_padding_holes", "padded window", "attn_mask", "decoder"]


@pytest.mark.parametrize("kind", SHORT_KINDS)
def test_short_sequences(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp for every 16 queries; keys that are padding to the end are not visited. Padding needs no bits."""
    if kind != "attn_mask":
        monkeypatch.setattr(_visibility, "_build_bits", None)
    if kind == "padded window":
        kind = {"window": (30, 9), "key_padding": prefix([80, 23], 100).to(device)}
    options = dict(B=2, mask=kind, dropout_p=0.2, bias=(2, 1, 1, 100), device=device)
    check(make(H=2, Hk=1, Lq=100, Lk=100, D=40, dtype=BFLOAT16, **options), device)
    check(make(H=1, Lq=120, Lk=100, D=72, dtype=FLOAT16, **options), device)


@pytest.mark.parametrize("dtype, D", [(FLOAT32, 40), (FLOAT32, 96), (FLOAT32, 256), (BFLOAT16, 136)])
@pytest.mark.parametrize("kind", ["key_padding", "decoder", "attn_mask", "segments_causal"])
def test_short_sequences_of_any_head_dim(kind: str, dtype: torch.dtype, D: int, device: torch.device) -> None:
    """float32 of head dimension 256 has two blocks of queries, the second of which is not full."""
    check(make(B=2, H=1, Lq=110, Lk=100, D=D, dtype=dtype, mask=kind, dropout_p=0.2, device=device), device)


@pytest.mark.parametrize("D", [1, 8, 16, 33, 40, 64, 72, 80, 96, 127, 128, 160, 256])
@pytest.mark.parametrize("dtype, kind", [(FLOAT32, "causal"), (BFLOAT16, "everything"), (FLOAT16, "decoder")])
def test_head_dims(D: int, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    check(make(B=1, H=1, Lq=19, Lk=35, D=D, dtype=dtype, mask=kind, device=device), device)


@pytest.mark.parametrize("D, Dv", [(16, 64), (64, 16), (33, 72), (256, 40), (1, 3)])
def test_value_dim_differs(D: int, Dv: int, device: torch.device) -> None:
    check(make(B=1, D=D, Dv=Dv, dtype=BFLOAT16, mask="attn_mask", device=device), device)


@pytest.mark.parametrize("kind", ["causal", "attn_mask", "key_padding"])
@pytest.mark.parametrize("H, Hk", [(4, 2), (3, 1)])
def test_grouped_heads(H: int, Hk: int, kind: str, device: torch.device) -> None:
    check(make(B=2, H=H, Hk=Hk, Lq=13, Lk=18, D=16, dtype=BFLOAT16, mask=kind, device=device), device)


@pytest.mark.parametrize("B, H, Lq, Lk", [(0, 2, 5, 6), (2, 0, 5, 6), (2, 2, 0, 6), (2, 2, 5, 0)])
@pytest.mark.parametrize("kind", ["none", "causal", "key_padding", "attn_mask_2d"])
def test_nothing_to_do(B: int, H: int, Lq: int, Lk: int, kind: str, device: torch.device) -> None:
    mask = {
        "none": {},
        "causal": {"is_causal": True},
        "key_padding": {"key_padding": torch.ones(1, Lk, dtype=torch.bool, device=device)},
        "attn_mask_2d": {"attn_mask": torch.ones(Lq, Lk, dtype=torch.bool, device=device)},
    }[kind]
    backend_call("cuda", device)
    for dtype in (FLOAT32, BFLOAT16):
        q, k, v = (torch.randn(B, H, n, 8, dtype=dtype, device=device) for n in (Lq, Lk, Lk))
        out, lse, weights = SDPA(q, k, v, AttentionMask(**mask), return_lse=True, return_weights=True, backend="cuda")
        assert out.shape == q.shape and lse.shape == (B, H, Lq) and weights.shape == (B, H, Lq, Lk)
        assert not out.any() and (lse == -torch.inf).all()


def views(p: Problem) -> dict[str, Problem]:
    """The same problem in other memory."""

    def by_position(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(t: Tensor, before: int, after: int) -> Tensor:
        wide = t.new_full((*t.shape[:3], before + t.shape[3] + after), torch.nan)
        view = wide[..., before : before + t.shape[3]]
        return view.copy_(t)

    packed = torch.cat([p.q, p.k, p.v], -1).transpose(1, 2).contiguous().transpose(1, 2)  # a projection seen as heads
    D, Dv = p.q.shape[3], p.v.shape[3]
    q, k, v = packed.split([D, D, Dv], -1)
    return {
        "heads inside positions": p.but(q=by_position(p.q), k=by_position(p.k), v=by_position(p.v)),
        "one projection": p.but(q=q, k=k, v=v),
        "off a boundary": p.but(q=inside(p.q, 1, 7), k=inside(p.k, 3, 5), v=inside(p.v, 1, 2)),
        "rows apart": p.but(q=inside(p.q, 8, 8), k=inside(p.k, 16, 0), v=inside(p.v, 0, 8)),
        "one sample for all": p.but(k=p.k[:1].expand_as(p.k), v=p.v[:1].expand_as(p.v)),
    }


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_memory_orders(dtype: torch.dtype, device: torch.device) -> None:
    """Strides are served in place; out lies as q does."""
    p = make(B=2, H=3, Lq=21, Lk=21, D=16, dtype=dtype, mask="causal", device=device)
    straight = check(p, device)
    for name, other in views(p).items():
        result = check(other, device)
        if name != "one sample for all":
            assert torch.equal(result.out, straight.out), name
    by_position = views(p)["heads inside positions"]
    assert solve(by_position, backend_call("cuda", device), needs="").out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("garbage, Lk", [(torch.nan, 150), (torch.inf, 120)], ids=["nan", "inf, short"])
@pytest.mark.parametrize("kind", HIDING)
def test_what_nobody_sees_reaches_nothing(kind: str, garbage: float, Lk: int, device: torch.device) -> None:
    """Unseen keys and values, and queries that see nothing, may hold anything."""
    mask = {"bias": "none", "packed and padded": packed_and_padded(40, Lk, device)}.get(kind, kind)
    p = make(B=2, H=2, Lq=40, Lk=Lk, D=16, dtype=BFLOAT16, mask=mask, device=device)
    if kind == "bias":
        bias = torch.zeros(2, 1, 40, Lk, device=device)
        bias[0, :, :, 70:] = bias[1, :, :, 3] = bias[1, :, 17] = -torch.inf
        p = p.but(bias=bias)
    keep = AttentionMask(**p.mask).dense(*p.shape, device)
    keep = keep if p.bias is None else keep & (p.bias != -torch.inf)
    seen, sees = keep.any(-2)[..., None], keep.any(-1)[..., None]
    assert not seen.all(), "this mask hides no key"
    clean = solve(p, backend_call("cuda", device), needs="")
    dirty = p.but(q=p.q.where(sees, garbage), k=p.k.where(seen, garbage), v=p.v.where(seen, garbage))
    result = solve(dirty, backend_call("cuda", device), needs="")
    compare(p, result, ("out", "lse", "weights"))
    assert all(torch.equal(a, b) for a, b in zip(result[:3], clean[:3], strict=True))


RACES = [
    dict(B=1, H=2, Lq=70, Lk=200, D=32, mask="decoder", dropout_p=0.2, bias=(1, 1, 1, 200)),
    dict(B=1, H=1, Lq=130, Lk=300, D=64, mask="none"),
    dict(B=1, H=2, Lq=90, Lk=70, D=40, mask="key_padding", dropout_p=0.2),
]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("arguments", RACES, ids=["everything", "nothing", "short"])
def test_bits_do_not_depend_on_the_run(
    arguments: dict, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps, lanes and blocks, and however late a copy arrives."""
    results = []
    for order in ORDERS:
        for completion in COMPLETIONS:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            results.append(check(make(**arguments, dtype=dtype, device=device), device))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:3], other[:3], strict=True))


@pytest.mark.parametrize("dropout_p", [1e-6, 0.5, 1.0])
def test_dropout_rates(dropout_p: float, device: torch.device) -> None:
    """compare() holds every weight against the written rule."""
    check(make(Lq=40, Lk=100, dtype=BFLOAT16, dropout_p=dropout_p, device=device), device)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_scales(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    check(make(dtype=dtype, mask="attn_mask", device=device).but(scale=scale), device)


@pytest.mark.parametrize("far", [-1e4, torch.finfo(FLOAT32).min])
@pytest.mark.parametrize("dtype, capability", [(BFLOAT16, "80"), (BFLOAT16, "90"), (FLOAT32, "80")])
def test_rows_that_a_bias_moves_far(
    far: float, dtype: torch.dtype, capability: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models mask with such numbers, whole rows included: they are the mean of all values, not empty. Their lse
    is coarse, so exp(S - lse) is no truth here; the formula of the reference subtracts the largest score instead."""
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", capability)  # which of the two forwards serves on a CPU
    bias = torch.zeros(1, 1, 21, 37, device=device)
    bias[:, :, 3] = bias[..., 30:] = far
    p = make(dtype=dtype, device=device).but(bias=bias)
    actual = solve(p, backend_call("cuda", device), needs="")
    options = {"return_lse": True, "return_weights": True, "backend": "reference"}
    truth = SDPA(p.q.double(), p.k.double(), p.v.double(), bias.double(), **options)
    low = SDPA(p.q, p.k, p.v, bias, **options)
    for name, a, t, w in zip(("out", "lse", "weights"), actual, truth, low, strict=False):
        assert_close_as_torch(a, t, w, name)


def test_tf32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch allows tf32, the inputs are rounded to it, and so are the weights before they meet v."""
    p = make(Lq=70, Lk=90, D=40, mask="everything", device=device)
    before = solve(p, backend_call("cuda", device), needs="")
    monkeypatch.setattr(backend, "_tf32", lambda: True)
    rounded = p.but(q=round_tf32(p.q), k=round_tf32(p.k), v=round_tf32(p.v))
    result = solve(p, backend_call("cuda", device), needs="")
    assert not torch.equal(result.out, before.out)
    compare(rounded, result, ("lse",))
    low = (plain(rounded).weights.bfloat16().float() @ rounded.v).float()  # 8 bits of weight where tf32 has 11
    assert_close_as_torch(result.out, exact(rounded).out, low)
    error = (result.out.double() - exact(rounded).out).abs().max()
    assert error < (low.double() - exact(rounded).out).abs().max() / 4


def test_a_sample_does_not_depend_on_its_batch(device: torch.device) -> None:
    """Bit for bit: alone or in a batch; and with more padding behind it."""
    attend = backend_call("cuda", device)
    lengths = prefix([90, 9, 65], 90).to(device)
    p = make(B=3, H=1, Lq=20, Lk=90, D=16, dtype=BFLOAT16, device=device, mask={"key_padding": lengths})
    whole = solve(p, attend, needs="")
    for b in range(3):
        one = {name: getattr(p, name)[b : b + 1] for name in ("q", "k", "v", "dout", "dlse")}
        alone = solve(p.but(**one, mask={"key_padding": lengths[b : b + 1]}), attend, needs="")
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(alone[:3], whole[:3], strict=True))


def test_explained(device: torch.device) -> None:
    q = torch.randn(1, 2, 5, 16, device=device)
    with torch.no_grad():
        explanation = explain("attention", q, q, q, is_causal=True)
    assert explanation.refusals["cuda"] is None
    assert explanation.chosen != "cuda", "no GPU has timed it yet: it serves where it is asked for by name"


def test_refusals(device: torch.device) -> None:
    """Each limit is refused with what was got."""
    q = torch.empty(1, 1, 4, 16, device=device)
    wide = torch.empty(1, 1, 4, 257, device=device)
    bias = AttentionMask(bias=torch.zeros(4, 4, device=device, dtype=torch.float64))
    assert backend.why_not(q, q, q, None, 0.0) is None
    for arguments, said in (
        ((q.double(), q.double(), q.double(), None), "float64"),
        ((wide, wide, q, None), "got 257 and 16"),
        ((q, q, wide, None), "got 16 and 257"),
        ((q, q, q, bias), "bias in float32, bfloat16 or float16, got torch.float64"),
        ((q.to("meta"), q, q, None), "meta"),
    ):
        assert said in backend.why_not(*arguments, 0.0)
