"""The CUDA attention's backward, the kernels for every length and those for short ones: on the CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_checks import Problem, Results, compare, make, plain
from host_build import COMPLETIONS, ORDERS
from mask_cases import HIDING, KINDS, offsets, packed_and_padded, prefix, scattered
from torch import Tensor
from torch.nn.functional import pad

from fastattn import AttentionMask
from fastattn.cuda import _attention_short as short
from fastattn.cuda import attention as backend
from fastattn.reference import philox

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
LOW = BFLOAT16, FLOAT16
GRADS = "dq", "dk", "dv", "dbias"


def backward(p: Problem) -> Results:
    """Through the backend's functions, so that nobody but it chooses the kernels."""
    torch.manual_seed(p.seed)
    rng_state = philox.draw_rng_state(p.q.device) if p.dropout_p > 0 else None
    rest = (AttentionMask(**p.mask, bias=p.bias), p.scale, p.dropout_p, rng_state)
    out, lse = backend.attention_fwd(p.q, p.k, p.v, *rest)
    grads = backend.attention_bwd(p.dout, p.dlse, p.q, p.k, p.v, out, lse, *rest, p.bias is not None)
    return Results(out, lse, None, *grads)


def check(p: Problem) -> Results:
    actual = backward(p)
    compare(p, actual, GRADS)
    return actual


@pytest.fixture(params=["any length", "short"])
def kernels(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels run: those of short sequences must serve, or must not."""
    monkeypatch.setattr(backend.sm90, "serves", lambda *_: False)
    if request.param == "any length":
        monkeypatch.setattr(short, "serves", lambda *_: False)
    else:
        serves = short.serves

        def must_serve(*tensors: Tensor) -> bool:
            assert serves(*tensors), "a test of the short kernel must reach it"
            return True

        monkeypatch.setattr(short, "serves", must_serve)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_mask_kinds(kind: str, kernels: str, device: torch.device) -> None:
    """Several tiles; with dropout and a bias whose gradient is a sum, which the short kernel leaves to another one;
    grouped heads in float32, whose sums the short kernel keeps in memory."""
    bias = (2, 2, 70, 100) if kernels == "short" else None
    check(make(B=2, H=2, Lq=70, Lk=100, D=24, dtype=BFLOAT16, mask=kind, bias=bias, device=device))
    options = dict(bias=(1, 4, 37, 45), dropout_p=0.3, device=device)
    check(make(B=2, H=4, Hk=2, Lq=37, Lk=45, D=16, dtype=FLOAT16, mask=kind, **options))
    check(make(B=2, H=3, Hk=1, Lq=19, Lk=35, D=8, mask=kind, dlse=False, device=device))


@pytest.mark.parametrize("kind", ["none", "causal", "window", "key_padding_holes", "attn_mask", "segments", "decoder"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_long(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Tiles of every class, the last of them ragged, and more than one block of bits."""
    check(make(B=1, H=2, Hk=1, Lq=150, Lk=270, D=40, dtype=dtype, mask=kind, dropout_p=0.1, device=device))


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (1, 65), (128, 1), (31, 33), (32, 32), (64, 97), (65, 127), (128, 128)])
def test_lengths_at_tile_edges(Lq: int, Lk: int, kernels: str, device: torch.device) -> None:
    mask = {"is_causal": True, "align": "bottom_right"} if Lq <= Lk else {"key_padding": prefix([Lk], Lk).to(device)}
    check(make(B=1, H=8 if Lq * Lk == 1 else 1, Lq=Lq, Lk=Lk, D=16, dtype=BFLOAT16, mask=mask, device=device))


@pytest.mark.parametrize("D", [1, 8, 33, 64, 72, 127, 128])
def test_head_dims(D: int, kernels: str, device: torch.device) -> None:
    dtype, kind = (FLOAT16, "causal") if D % 2 else (BFLOAT16, "everything")
    check(make(B=1, H=1, Lq=40, Lk=70, D=D, Dv=max(D - 5, 3), dtype=dtype, mask=kind, device=device))


@pytest.mark.parametrize("D, Dv", [(160, 256), (256, 256), (5, 130)])
@pytest.mark.parametrize("dtype, kind", [(FLOAT32, "causal"), (BFLOAT16, "everything"), (FLOAT16, "segments_causal")])
def test_wide_heads(D: int, Dv: int, dtype: torch.dtype, kind: str, kernels: str, device: torch.device) -> None:
    """dk and dv are made by different blocks; for short sequences slice after slice, and summed in memory."""
    check(make(B=1, H=2, Hk=1, Lq=40, Lk=70, D=D, Dv=Dv, dtype=dtype, mask=kind, dropout_p=0.2, device=device))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kernels", ["short"], indirect=True)
def test_what_a_smaller_chip_holds(
    dtype: torch.dtype, kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 KiB of shared memory, on which the choice of a kernel depends, hold 64 keys of 128 dimensions, not 128."""
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "86")
    for Lk in (64, 128):
        check(make(B=2, H=2, Hk=1, Lq=50, Lk=Lk, D=128, dtype=dtype, mask="decoder", dropout_p=0.2, device=device))


@pytest.mark.parametrize("D, mask", [(1, "causal"), (33, "key_padding_holes"), (64, "attn_mask"), (100, "decoder")])
def test_float32(D: int, mask: str, kernels: str, device: torch.device) -> None:
    bias = (2, 2, 70, 100) if D < 40 else (2, 1, 70, 100)
    check(make(B=2, H=2, Lq=70, Lk=100, D=D, mask=mask, bias=bias, dropout_p=0.2, device=device))


def test_tf32(kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch allows tf32, products are as coarse as its 11 bits of mantissa, and no coarser."""
    p = make(B=1, H=2, Lq=70, Lk=90, D=40, mask="causal", bias=(1, 2, 70, 90), device=device)
    before = check(p)
    monkeypatch.setattr(backend, "_tf32", lambda: True)
    after = backward(p)
    for name in GRADS:
        exact, rounded = getattr(before, name), getattr(after, name)
        assert not torch.equal(exact, rounded), name
        assert (exact - rounded).abs().max() < 3e-3 * exact.abs().max(), name


# (B, H, Lq, Lk) of the problem is (2, 2, 70, 140), or, of short sequences, (2, 2, 70, 90).
BIASES = [(1, 1, 70, 140), (2, 1, 70, 140), (1, 2, 70, 140), (2, 2, 70, 140), (2, 2, 70, 90)]
BIASES += [(1, 1, 1, 140), (2, 2, 1, 140), (1, 1, 1, 90), (2, 2, 1, 90)]
BIASES += [(1, 2, 70, 1), (2, 1, 70, 1), (2, 2, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("dtype, bias_dtype", [(BFLOAT16, FLOAT16), (FLOAT16, FLOAT32), (FLOAT32, BFLOAT16)])
def test_bias_shapes(shape: tuple[int, ...], dtype: torch.dtype, bias_dtype: torch.dtype, device: torch.device) -> None:
    options = dict(mask="key_padding_holes", bias=shape, bias_dtype=bias_dtype, dropout_p=0.2)
    check(
        make(B=2, H=2, Hk=1, Lq=70, Lk=shape[3] if shape[3] > 1 else 140, D=16, dtype=dtype, device=device, **options)
    )


@pytest.mark.parametrize("dtype", LOW)
def test_bias_of_queries_gets_no_rounding_of_out(dtype: torch.dtype, kernels: str, device: torch.device) -> None:
    """Nothing but lse depends on a bias that all keys share: without a gradient of lse its own is 0, exactly."""
    p = make(B=2, H=2, Lq=40, Lk=50, D=16, dtype=dtype, mask="causal", bias=(1, 2, 40, 1), dlse=False, device=device)
    assert not check(p).dbias.any()


@pytest.fixture(params=["80", "90"])
def no_short_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of any length go to the kernels for all, of this chip. (Those of short ones take delta as defined.)"""
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", request.param)  # whose kernels serve on a CPU
    monkeypatch.setattr(short, "serves", lambda *_: False)


SEE_ONE_KEY = [
    ("the only one", 70, 1, {}),
    ("its own", 70, 70, {"window": (0, 0)}),
    ("the first", 1, 70, {"is_causal": True}),
    ("padding", 70, 140, {"key_padding": torch.arange(140)[None] == 133}),
    ("anywhere", 150, 270, {"attn_mask": scattered(150, 270, 1)}),
]


@pytest.mark.usefixtures("no_short_kernel")
@pytest.mark.parametrize("Lq, Lk, mask", [case[1:] for case in SEE_ONE_KEY], ids=[case[0] for case in SEE_ONE_KEY])
def test_queries_that_see_one_key(Lq: int, Lk: int, mask: dict, device: torch.device) -> None:
    """dP equals delta but for dropout's rounding of out, which must not show."""
    mask = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in mask.items()}
    for dtype in LOW:
        check(make(B=1, H=2, Lq=Lq, Lk=Lk, D=64, dtype=dtype, mask=mask, dropout_p=0.3, device=device))


@pytest.mark.usefixtures("no_short_kernel")
@pytest.mark.parametrize("seed, dropout_p", [(47, 0.5), (72, 0.3), (76, 0.5)])
def test_few_queries_that_see_two_keys(seed: int, dropout_p: float, device: torch.device) -> None:
    """The same noise, beside numbers so few that none of the plain formula's errors need be large."""
    mask = {"attn_mask": scattered(17, 33, 2, seed).to(device)}
    check(make(B=1, H=2, Lq=17, Lk=33, D=8, dtype=BFLOAT16, mask=mask, dropout_p=dropout_p, device=device, seed=seed))


@pytest.mark.few_queries
@pytest.mark.usefixtures("no_short_kernel")
@pytest.mark.parametrize(
    "Lq, padding, D, dropout_p, seed",
    [(40, 0, 16, 0.5, 8), (5, 0, 16, 0.0, 26), (3, 300, 64, 0.5, 101)],
    ids=["few", "few without dropout", "few that see any"],
)
def test_few_queries_whose_keys_are_far_apart(
    Lq: int, padding: int, D: int, dropout_p: float, seed: int, device: torch.device
) -> None:
    """No tile of keys says what delta is. The host knows how few queries there are, a block how few of its own see."""
    p = make(B=1, H=1, Lq=Lq, Lk=300, D=D, dtype=FLOAT16, dropout_p=dropout_p, device=device, seed=seed)
    keep = pad(scattered(Lq, 300, 2, seed), (0, 0, 0, padding))
    queries = {name: pad(getattr(p, name), (0, 0, 0, padding)) for name in ("q", "dout")}
    check(p.but(mask={"attn_mask": keep.to(device)}, dlse=pad(p.dlse, (0, padding)), **queries))


@pytest.mark.usefixtures("no_short_kernel")
def test_tokens_alone(device: torch.device) -> None:
    """Most of the packed sequences are a single token: there, rounding of out is all that a coarse dS would hold."""
    mask = {"cu_seqlens_q": offsets(*[1] * 100, 10).to(device)}
    check(make(B=1, H=2, Lq=110, Lk=110, D=32, dtype=BFLOAT16, mask=mask, dropout_p=0.1, device=device))


@pytest.mark.usefixtures("no_short_kernel")
def test_heavy_dropout(device: torch.device) -> None:
    """It scales up the few weights that it leaves, and with them the rounding of out."""
    mask = {"window": (9, 0)}
    check(make(B=1, H=2, Lq=60, Lk=60, D=64, dtype=FLOAT16, mask=mask, dropout_p=0.97, device=device, seed=1))


@pytest.mark.parametrize("far", [-1e4, -1e8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_a_bias_moves_far(far: float, dtype: torch.dtype, kernels: str, device: torch.device) -> None:
    """Some models mask with such numbers, whole rows included. There lse is coarse; the gradients are not."""
    bias = torch.zeros(1, 1, 70, 20, device=device)
    bias[:, :, 3] = bias[:, :, 67] = bias[..., 10:13] = far
    p = make(Lq=70, Lk=20, dtype=dtype, device=device).but(bias=bias)
    compare(p, backward(p), GRADS, low=plain(p))  # not by exp(S - lse), as other checks


@pytest.mark.parametrize("B, H, Lq, Lk", [(0, 2, 5, 6), (2, 0, 5, 6), (2, 2, 0, 6), (2, 2, 5, 0)])
@pytest.mark.parametrize("kind", ["none", "causal", "key_padding"])
def test_nothing_to_do(B: int, H: int, Lq: int, Lk: int, kind: str, kernels: str, device: torch.device) -> None:
    mask = {
        "none": {},
        "causal": {"is_causal": True},
        "key_padding": {"key_padding": torch.ones(1, Lk, dtype=torch.bool, device=device)},
    }[kind]
    q, k, v = (torch.randn(B, H, n, 8, device=device).bfloat16() for n in (Lq, Lk, Lk))
    out, lse = torch.zeros_like(q), torch.full((B, H, Lq), -torch.inf, device=device)
    grads = backend.attention_bwd(q, lse, q, k, v, out, lse, AttentionMask(**mask), 1.0, 0.0, None, False)
    assert all(not g.any() and g.shape == t.shape for g, t in zip(grads, (q, k, v), strict=False))


def views(p: Problem) -> dict[str, Problem]:
    """The same problem in other memory."""

    def by_position(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(t: Tensor, before: int, after: int) -> Tensor:
        wide = t.new_full((*t.shape[:3], before + t.shape[3] + after), torch.nan)
        return wide[..., before : before + t.shape[3]].copy_(t)

    return {
        "heads inside positions": p.but(**{n: by_position(getattr(p, n)) for n in ("q", "k", "v", "dout")}),
        "off bounds": p.but(q=inside(p.q, 1, 7), k=inside(p.k, 3, 5), v=inside(p.v, 1, 2), dout=inside(p.dout, 3, 2)),
        "rows apart": p.but(q=inside(p.q, 8, 8), k=inside(p.k, 16, 0), dout=inside(p.dout, 0, 8)),
        "dout of one number": p.but(dout=p.dout[:1, :1, :1, :1].expand_as(p.dout)),
        "transposed dout": p.but(dout=p.dout.mT.contiguous().mT, dlse=p.dlse.mT.contiguous().mT),
    }


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_memory_orders(dtype: torch.dtype, kernels: str, device: torch.device) -> None:
    """Strides are served in place; gradients lie as what they are gradients of."""
    p = make(B=2, H=3, Lq=40, Lk=40, D=16, dtype=dtype, mask="causal", device=device)
    straight = check(p)
    for name, other in views(p).items():
        result = check(other)
        if name != "dout of one number":
            assert all(torch.equal(a, b) for a, b in zip(result[3:6], straight[3:6], strict=True)), name
    assert backward(views(p)["heads inside positions"]).dk.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("D, dtype", [(40, BFLOAT16), (37, BFLOAT16), (40, FLOAT32), (37, FLOAT32)])
def test_writes_nowhere_else(
    D: int, dtype: torch.dtype, kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients lie inside larger tensors, of which nothing else may change: whole vectors, and single elements."""
    around = []

    def empty_like(x: Tensor, head_dim: int) -> Tensor:
        B, H, L, _ = x.shape
        around.append(torch.full((B, H, L + 16, head_dim + 16), 7.0, dtype=x.dtype, device=device))
        return around[-1][:, :, 8 : 8 + L, 8 : 8 + head_dim]

    monkeypatch.setattr(backend, "_empty_like", empty_like)
    p = make(B=1, H=2, Lq=41, Lk=70, D=D, dtype=dtype, mask="causal", device=device)
    grads = check(p)[3:6]
    assert len(around) == 4, "of out, dq, dk and dv"
    for whole, grad in zip(around[1:], grads, strict=True):
        inside = whole.new_zeros(whole.shape)
        inside[:, :, 8 : 8 + grad.shape[2], 8 : 8 + D] = 1
        assert (whole[inside == 0] == 7).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", HIDING)
def test_what_nobody_sees_reaches_nothing(kind: str, garbage: float, kernels: str, device: torch.device) -> None:
    """Unseen keys and values, queries that see nothing with all that flows back to them, and a bias of hidden scores,
    may hold anything."""
    packed = kind == "packed and padded"
    mask = packed_and_padded(40, 100, device) if packed else "none" if kind == "bias" else kind
    bias = (2, 2, 40, 100) if packed else None
    p = make(B=2, H=2, Lq=40, Lk=100, D=16, dtype=BFLOAT16, mask=mask, bias=bias, device=device)
    if kind == "bias":
        bias = torch.zeros(2, 2, 40, 100, device=device)
        bias[0, :, :, 70:] = bias[1, :, :, 3] = bias[1, :, 17] = -torch.inf
        p = p.but(bias=bias)
    keep = AttentionMask(**p.mask).dense(*p.shape, device)
    keep = keep if p.bias is None else keep & (p.bias != -torch.inf)
    seen, sees = keep.any(-2)[..., None], keep.any(-1)[..., None]
    assert not (seen.all() and sees.all()), "this mask hides nothing"
    clean = check(p)
    dirty = p.but(
        q=p.q.where(sees, garbage),
        k=p.k.where(seen, garbage),
        v=p.v.where(seen, garbage),
        dout=p.dout.where(sees, garbage),
        dlse=p.dlse.where(sees[..., 0], garbage),
        bias=p.bias.where(keep, garbage) if packed else p.bias,
    )
    for name, a, b in zip(GRADS, backward(dirty)[3:], clean[3:], strict=True):
        assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("Lk, bias", [(200, (1, 1, 70, 200)), (90, (1, 4, 70, 90))], ids=["long", "short"])
def test_bits_do_not_depend_on_the_run(
    Lk: int, bias: tuple[int, ...], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps, lanes and blocks, and however late a copy arrives."""
    results = []
    for order in ORDERS:
        for completion in COMPLETIONS:
            monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
            monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
            options = dict(mask="decoder", dropout_p=0.2, bias=bias, dtype=dtype, device=device)
            results.append(check(make(B=1, H=4, Hk=2, Lq=70, Lk=Lk, D=64, **options)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][3:], other[3:], strict=True))


@pytest.mark.parametrize("kernels", ["short"], indirect=True)
@pytest.mark.parametrize("D", [40, 136])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("Lk", [1, 70])
def test_of_a_single_key_nothing_is_left(
    Lk: int, dtype: torch.dtype, D: int, kernels: str, device: torch.device
) -> None:
    """Its weight is 1, whatever the scores: dq and dk are 0 to the last bit, as in the formula."""
    mask = {"attn_mask": scattered(100, Lk, 1).to(device)}
    actual = check(make(B=1, H=2, Lq=100, Lk=Lk, D=D, dtype=dtype, mask=mask, dropout_p=0.1, dlse=False, device=device))
    assert not actual.dq.any() and not actual.dk.any()


@pytest.mark.parametrize("B", [1, 2])
def test_gradient_of_lse_where_little_else_is_left(B: int, kernels: str, device: torch.device) -> None:
    """One query that sees one key: dS is dlse, of which dP, the larger one, takes no digits where float32 is exact."""
    one = torch.zeros(1, 1, 2, 2, dtype=torch.bool, device=device)
    one[..., 1, 0] = True
    check(make(B=B, H=1, Lq=2, Lk=2, D=40, mask={"attn_mask": one}, bias=(1, 1, 2, 2), seed=6, device=device))


def test_who_serves(device: torch.device) -> None:
    """The short kernels take all that is short."""
    for Lq, Lk, served in ((128, 128, True), (1, 1, True), (129, 64, False), (64, 129, False)):
        q, k = (torch.empty(1, 1, length, 256, device=device) for length in (Lq, Lk))
        assert short.serves(q, k, k) == served
