"""The CUDA attention on Hopper: on the CPU through csrc/host, which is told to be one, and on a GPU that is one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_checks import Problem, Results, backend_call, compare, make, plain, solve
from host_build import ORDERS, SM90_COMPLETIONS
from mask_cases import KINDS, packed_and_padded, prefix
from test_kernels_attention import SHORT_KINDS, views
from test_kernels_attention_backward import views as backward_views
from torch import Tensor
from turns import two_turns_on

from fastattn import AttentionMask
from fastattn.cuda import _attention_short as short
from fastattn.cuda import _attention_sm90 as sm90
from fastattn.cuda import _visibility
from fastattn.cuda import attention as backend

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SETTINGS = tuple(itertools.product(ORDERS, SM90_COMPLETIONS))
SHORT_SERVES = short.serves


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "90")
    # Tests ask torch for it, so that what is uninitialised is NaN.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(short, "serves", lambda *_: False)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("this GPU is no Hopper")
    yield device


@pytest.fixture
def sum_of_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    """dq is what blocks add up in memory."""
    monkeypatch.setattr(sm90, "ACCUMULATE_DQ", True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the Hopper calls that the backend made."""
    made: list[str] = []
    for name in ("forward", "backward"):
        call = getattr(sm90, name)

        def record(*arguments: Any, name: str = name, call: Any = call, **options: Any) -> Any:
            made.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(sm90, name, record)
    return made


def check(
    p: Problem, device: torch.device, calls: list[str], *, expected: tuple[str, ...] = ("forward", "backward")
) -> Results:
    actual = solve(p, backend_call("cuda", device, weights=False))
    compare(p, actual, Results._fields)
    assert tuple(calls) == expected
    calls.clear()
    return actual


@pytest.mark.parametrize("kind", KINDS)
def test_mask_kinds(kind: str, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, the last ragged, some full, some empty; and all at once, without a gradient of lse."""
    check(make(B=2, H=1, Lq=201, Lk=269, D=64, mask=kind, dtype=BFLOAT16, device=hopper), hopper, calls)
    two_turns_on(monkeypatch)
    options = dict(mask=kind, bias=(1, 2, 37, 141), dropout_p=0.3, dlse=False, device=hopper)
    check(make(B=2, H=2, Hk=1, Lq=37, Lk=141, D=8, dtype=FLOAT16, **options), hopper, calls)


@pytest.mark.parametrize("kind", SHORT_KINDS)
def test_short_sequences(kind: str, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As shipped, with the backward of short sequences. Padding has no bits; the forward has no lists, of two tiles
    of keys neither, as head dimension 200 has them."""
    monkeypatch.setattr(short, "serves", SHORT_SERVES)
    if kind != "attn_mask":
        monkeypatch.setattr(_visibility, "_build_bits", None)
    if kind == "padded window":
        kind = {"window": (30, 9), "key_padding": prefix([80, 23], 100).to(hopper)}
    options = dict(B=2, H=1, Lk=100, mask=kind, device=hopper)
    check(make(Lq=100, D=40, dtype=BFLOAT16, **options), hopper, calls, expected=("forward",))
    general = make(Lq=120, D=72, dtype=FLOAT16, dropout_p=0.2, bias=(2, 1, 120, 100), **options)
    check(general, hopper, calls, expected=("forward",))
    check(make(Lq=40, D=200, dtype=BFLOAT16, **options), hopper, calls, expected=("forward",))


@pytest.mark.usefixtures("sum_of_dq")
@pytest.mark.parametrize("kind", ["none", "causal", "key_padding_holes", "attn_mask", "segments_causal", "everything"])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_dq_as_a_sum(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=2, Hk=1, Lq=151, Lk=269, D=D, mask=kind, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "causal", "decoder", "attn_mask", "everything"])
@pytest.mark.parametrize("D", [8, 72, 128, 256])
def test_head_dims(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=2, Lq=150, Lk=270, D=D, mask=kind, dtype=FLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("D, Dv", [(16, 64), (64, 24), (128, 40), (40, 96), (136, 40), (40, 248)])
def test_value_dim_differs(D: int, Dv: int, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=1, Lq=70, Lk=140, D=D, Dv=Dv, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (1, 300), (300, 1), (64, 128), (192, 128), (193, 129), (128, 127)])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True, "align": "bottom_right"}], ids=["none", "causal"])
def test_lengths_at_tile_edges(Lq: int, Lk: int, mask: dict, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=2, Lq=Lq, Lk=Lk, D=64, mask=mask, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "causal", "everything"])
@pytest.mark.parametrize("D", [64, 96, 256])
def test_dropout(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    """compare() draws the mask by the written rule."""
    check(make(B=2, H=2, Lq=70, Lk=150, D=D, mask=kind, dropout_p=0.3, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "window_bottom_right", "everything"])
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 70, 150), (1, 2, 70, 150), (2, 1, 70, 150), (1, 1, 70, 150), (2, 2, 1, 150), (1, 1, 1, 150), (2, 1, 70, 1)],
)
def test_bias(shape: tuple[int, ...], kind: str, hopper: torch.device, calls: list[str]) -> None:
    """Every way in which a bias is broadcast, and its gradient."""
    p = make(Lq=70, Lk=150, D=64, mask=kind, bias=shape, bias_dtype=torch.float32, dtype=BFLOAT16, device=hopper)
    check(p, hopper, calls)


@pytest.mark.parametrize("D, kind", [(40, "decoder"), (128, "segments_causal"), (256, "everything")])
def test_bias_with_dropout_and_groups(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    options = dict(mask=kind, bias=(1, 2, 140, 150), dropout_p=0.2, dtype=FLOAT16, device=hopper)
    check(make(B=1, H=2, Hk=1, Lq=140, Lk=150, D=D, **options), hopper, calls)


@pytest.mark.parametrize("offset", [-1e4, 1e4, torch.finfo(torch.float32).min])
def test_bias_that_moves_rows_far(offset: float, hopper: torch.device, calls: list[str]) -> None:
    """Where lse is coarse, its own rounding must not reach the gradients."""
    p = make(B=1, H=1, Lq=140, Lk=150, D=64, dtype=BFLOAT16, device=hopper)
    bias = torch.zeros(1, 1, 140, 150, device=hopper)
    bias[:, :, 70:] = offset
    check(p.but(bias=bias), hopper, calls)


@pytest.mark.parametrize("Lk", [100, 150])
def test_far_rows_under_dropout(Lk: int, hopper: torch.device) -> None:
    """Nobody wants dbias: the coarse rows are found by a kernel of its own, delta by the tile that is the only one."""
    p = make(B=1, H=1, Lq=140, Lk=Lk, D=64, dtype=BFLOAT16, dropout_p=0.3, device=hopper)
    far = torch.arange(140, device=hopper)[:, None] >= 70
    # Beside -1e8 the plain formula forgets a score of such a row: so they are all 0.
    p = p.but(q=p.q.masked_fill(far, 0.0), bias=torch.where(far, -1e8, 0.0).expand(1, 1, 140, Lk))
    compare(p, solve(p, backend_call("cuda", hopper, weights=False), needs="qkv"), ("dq", "dk", "dv"), low=plain(p))


@pytest.mark.parametrize("kind", ["causal", "attn_mask", "key_padding"])
@pytest.mark.parametrize("H, Hk", [(4, 2), (3, 1)])
def test_grouped_heads(H: int, Hk: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    p = make(B=2, H=H, Hk=Hk, Lq=70, Lk=140, D=64, mask=kind, dropout_p=0.1, dtype=BFLOAT16, device=hopper)
    check(p, hopper, calls)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
def test_scales(scale: float, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, Lq=70, Lk=140, mask="attn_mask", dtype=BFLOAT16, device=hopper).but(scale=scale), hopper, calls)


def test_many_tiles_of_few_blocks(hopper: torch.device, calls: list[str]) -> None:
    """Each block takes several tiles, of different lengths, and heads of several groups."""
    check(make(B=2, H=4, Hk=2, Lq=400, Lk=400, D=64, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls)


def test_memory_orders(hopper: torch.device, calls: list[str]) -> None:
    """Strides are served in place, those of dout too; what TMA cannot read, the other kernels do."""
    p = make(B=2, H=2, Lq=70, Lk=70, D=16, dtype=BFLOAT16, mask="causal", device=hopper)
    straight = check(p, hopper, calls)
    for name, other in itertools.chain(views(p).items(), backward_views(p).items()):
        served = name not in ("off a boundary", "off bounds", "one sample for all")
        result = check(other, hopper, calls, expected=("forward", "backward") if served else ())
        assert torch.equal(result.out, straight.out) or not served, name


@pytest.mark.parametrize("D", [40, 128])
def test_nothing_is_written_elsewhere(
    D: int, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results lie inside wider rows, with rows and heads to spare; what is around them stays as it was."""
    around: list[tuple[Tensor, tuple[slice, ...]]] = []

    def inside(x: Tensor, head_dim: int) -> Tensor:
        B, H, L, _ = x.shape
        whole = torch.full((B, H + 2, L + 64, head_dim + 24), 7.0, dtype=x.dtype, device=x.device)
        place = slice(None), slice(1, -1), slice(32, -32), slice(8, 8 + head_dim)
        around.append((whole, place))
        return whole[place].fill_(torch.nan)

    monkeypatch.setattr(backend, "_empty_like", inside)
    check(make(B=2, H=2, Lq=70, Lk=140, D=D, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls)
    assert len(around) == 4  # out, dq, dk, dv
    for whole, place in around:
        rest = whole.detach().clone()
        rest[place] = 7.0
        assert (rest == 7.0).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "kind", ["window_bottom_right", "key_padding_holes", "attn_mask", "decoder", "bias", "packed and padded"]
)
def test_what_nobody_sees_reaches_nothing(kind: str, garbage: float, hopper: torch.device) -> None:
    """Unseen keys and values, and queries that see nothing, may hold anything, and so may a bias of hidden scores."""
    packed = kind == "packed and padded"
    mask = packed_and_padded(150, 300, hopper) if packed else "none" if kind == "bias" else kind
    bias = (2, 2, 150, 300) if packed else None
    p = make(B=2, H=2, Lq=150, Lk=300, D=64, dtype=BFLOAT16, mask=mask, bias=bias, device=hopper)
    if kind == "bias":
        bias = torch.zeros(2, 1, 150, 300, device=hopper)
        bias[0, :, :, 70:] = bias[1, :, :, 3] = bias[1, :, 17] = -torch.inf
        p = p.but(bias=bias)
    keep = AttentionMask(**p.mask).dense(*p.shape, hopper)
    keep = keep if p.bias is None else keep & (p.bias != -torch.inf)
    seen, sees = keep.any(-2)[..., None], keep.any(-1)[..., None]
    assert not seen.all(), "this mask hides no key"
    dirty = {name: getattr(p, name).where(seen, garbage) for name in ("k", "v")}
    dirty |= {name: getattr(p, name).where(sees, garbage) for name in ("q", "dout")}
    dirty["bias"] = p.bias.where(keep, garbage) if packed else p.bias
    compare(p, solve(p.but(**dirty), backend_call("cuda", hopper, weights=False)), Results._fields)


RACES = {
    "masked": dict(B=1, H=2, Lq=200, Lk=270, D=64, mask="decoder", dropout_p=0.2),
    "full": dict(B=1, H=1, Lq=200, Lk=520, D=128, mask="none"),
    "wide": dict(B=1, H=1, Lq=150, Lk=140, D=256, mask="key_padding"),
    "biased": dict(B=2, H=1, Lq=140, Lk=150, D=64, mask="decoder", dropout_p=0.2, bias=(1, 1, 140, 150)),
}


@pytest.mark.parametrize("name", RACES)
def test_bits_do_not_depend_on_the_run(
    name: str, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps and blocks, and however late asynchronous work ends."""
    p = make(**RACES[name], dtype=BFLOAT16, device=hopper)
    first, *others = in_every_setting(p, hopper, calls, monkeypatch)
    for other in others:
        for a, b, what in zip(first, other, Results._fields, strict=True):
            assert a is None or torch.equal(a, b), what


@pytest.mark.usefixtures("sum_of_dq")
@pytest.mark.parametrize("D", [64, 128])
def test_sum_in_every_setting(D: int, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """dq is right however it is summed; dk and dv have equal bits."""
    p = make(B=1, H=1, Lq=200, Lk=270, D=D, mask="decoder", dtype=BFLOAT16, device=hopper)
    first, *others = in_every_setting(p, hopper, calls, monkeypatch)
    for other in others:
        assert torch.equal(first.dk, other.dk) and torch.equal(first.dv, other.dv)


def in_every_setting(
    p: Problem, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[Results]:
    results = []
    for order, completion in SETTINGS:
        monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
        monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
        results.append(check(p, device, calls))
    return results


@pytest.mark.parametrize("allowed, asked, dropout_p, D, made", [
    (False, False, 0.0, 64, "dq"),  # as shipped: no record shows the sum to be faster
    (True, False, 0.0, 64, "sum"),
    (True, True, 0.0, 64, "dq"),  # torch asks for runs that repeat
    (True, False, 0.1, 64, "dq"),
    (True, False, 0.0, 136, "dq"),
])  # fmt: skip
def test_who_makes_dq(
    allowed: bool, asked: bool, dropout_p: float, D: int, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sm90.ACCUMULATE_DQ is False
    monkeypatch.setattr(sm90, "ACCUMULATE_DQ", allowed)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
    assert sm90._accumulates(D, None, dropout_p) == (made == "sum")
    assert not sm90._accumulates(D, torch.zeros(1, 1, 1, 8), dropout_p)


def test_backends_of_two_architectures_are_interchangeable(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward by one, backward by the other: lse and dropout mean the same to both."""
    p = make(Lq=70, Lk=140, D=64, mask="decoder", dropout_p=0.3, dtype=BFLOAT16, device=hopper)
    serves = sm90.serves
    for tensors_of_one in (4, 8):  # of the forward, and of the backward
        with monkeypatch.context() as changed:
            changed.setattr(sm90, "serves", lambda *t, n=tensors_of_one: len(t) == n and serves(*t))
            compare(p, solve(p, backend_call("cuda", hopper, weights=False)), Results._fields)


def test_a_thread_that_has_not_used_cuda(hopper: torch.device) -> None:
    """Tensor maps want a context: the runner refuses to make them without."""
    p, found = make(Lq=70, Lk=140, D=64, dtype=BFLOAT16, device=hopper), []
    thread = threading.Thread(target=lambda: found.append(solve(p, backend_call("cuda", hopper, weights=False))))
    thread.start()
    thread.join()
    compare(p, found[0], Results._fields)


def test_other_devices_are_left_alone(device: torch.device, calls: list[str]) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("this GPU is a Hopper")
    check(make(dtype=BFLOAT16, device=device), device, calls, expected=())
    assert backend.sm90 is sm90
