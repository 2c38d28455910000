"""The CUDA attention on Hopper: on the CPU through csrc/host, which is told to be one, and on a GPU that is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_checks import Problem, Results, compare, make, room_call, solve
from host_build import ORDERS, SM90_COMPLETIONS
from mask_cases import KINDS
from test_kernels_attention import views
from torch import Tensor

from fastattn import AttentionMask
from fastattn.cuda import _attention_short as short
from fastattn.cuda import _attention_sm90 as sm90
from fastattn.cuda import attention as room

AS_SHIPPED = sm90.ACCUMULATE_DQ
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SETTINGS = tuple(itertools.product(ORDERS, SM90_COMPLETIONS))
FORWARD, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")  # the gradient of a bias is made by other kernels


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", "90")
    # Tests ask torch for it, so that what is uninitialised is NaN.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(sm90, "ACCUMULATE_DQ", True)
    monkeypatch.setattr(short, "serves", lambda *_: False)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("this GPU is no Hopper")
    yield device


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the Hopper calls that the room made."""
    made: list[str] = []
    for name in ("forward", "backward"):
        call = getattr(sm90, name)

        def record(*arguments: Any, name: str = name, call: Any = call) -> None:
            made.append(name)
            call(*arguments)

        monkeypatch.setattr(sm90, name, record)
    return made


def check(
    p: Problem, device: torch.device, calls: list[str], *, expected: tuple[str, ...] = ("forward", "backward")
) -> Results:
    actual = solve(p, room_call("cuda", device, weights=False))
    compare(p, actual, FORWARD + GRADIENTS)
    assert tuple(calls) == expected
    calls.clear()
    return actual


@pytest.mark.parametrize("kind", KINDS)
def test_mask_kinds(kind: str, hopper: torch.device, calls: list[str]) -> None:
    """Several tiles each way, the last ragged, some full, some empty."""
    check(make(B=2, H=1, Lq=200, Lk=270, D=64, mask=kind, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "causal", "decoder", "attn_mask", "everything"])
@pytest.mark.parametrize("D", [8, 72, 128])
def test_head_dims(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=2, Lq=150, Lk=270, D=D, mask=kind, dtype=FLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["causal", "everything"])
@pytest.mark.parametrize("D, Dv", [(256, 256), (136, 40), (40, 248)])
def test_wide_heads(D: int, Dv: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    p = make(B=1, H=1, Lq=150, Lk=150, D=D, Dv=Dv, mask=kind, dtype=BFLOAT16, device=hopper)
    check(p, hopper, calls, expected=("forward",))


@pytest.mark.parametrize("D, Dv", [(16, 64), (64, 24), (128, 40), (40, 96)])
def test_value_dim_differs(D: int, Dv: int, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=1, Lq=70, Lk=140, D=D, Dv=Dv, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (1, 300), (300, 1), (64, 128), (192, 128), (193, 129), (128, 127)])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True, "align": "bottom_right"}], ids=["none", "causal"])
def test_lengths_at_tile_edges(Lq: int, Lk: int, mask: dict, hopper: torch.device, calls: list[str]) -> None:
    check(make(B=1, H=2, Lq=Lq, Lk=Lk, D=64, mask=mask, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "causal", "everything"])
@pytest.mark.parametrize("D", [64, 128])
def test_dropout(D: int, kind: str, hopper: torch.device, calls: list[str]) -> None:
    """compare() draws the mask by the written rule."""
    check(make(B=2, H=2, Lq=70, Lk=150, D=D, mask=kind, dropout_p=0.3, dtype=BFLOAT16, device=hopper), hopper, calls)


@pytest.mark.parametrize("kind", ["none", "window_bottom_right", "everything"])
@pytest.mark.parametrize("shape", [(2, 2, 70, 150), (1, 1, 1, 150), (2, 1, 70, 1)])
def test_bias(shape: tuple[int, ...], kind: str, hopper: torch.device, calls: list[str]) -> None:
    """The forward takes a bias; its gradient, and all with it, are the other kernels'."""
    p = make(Lq=70, Lk=150, D=64, mask=kind, bias=shape, bias_dtype=torch.float32, dtype=BFLOAT16, device=hopper)
    check(p, hopper, calls, expected=("forward",))


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
    """Strides are served in place; what TMA cannot read, the other kernels do."""
    p = make(B=2, H=3, Lq=70, Lk=70, D=16, dtype=BFLOAT16, mask="causal", device=hopper)
    straight = check(p, hopper, calls)
    for name, other in views(p).items():
        served = name not in ("off a boundary", "one sample for all")
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

    monkeypatch.setattr(room, "_empty_like", inside)
    check(make(B=2, H=2, Lq=70, Lk=140, D=D, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls)
    assert len(around) == 4  # out, dq, dk, dv
    for whole, place in around:
        rest = whole.detach().clone()
        rest[place] = 7.0
        assert (rest == 7.0).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["window_bottom_right", "key_padding_holes", "attn_mask", "decoder", "bias"])
def test_what_nobody_sees_reaches_nothing(kind: str, garbage: float, hopper: torch.device) -> None:
    """Unseen keys and values, and queries that see nothing, may hold anything."""
    p = make(B=2, H=2, Lq=150, Lk=300, D=64, dtype=BFLOAT16, mask="none" if kind == "bias" else kind, device=hopper)
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
    compare(p, solve(p.but(**dirty), room_call("cuda", hopper, weights=False)), FORWARD + GRADIENTS)


RACES = {
    "masked": dict(B=1, H=2, Lq=200, Lk=270, D=64, mask="decoder", dropout_p=0.2),
    "full": dict(B=1, H=1, Lq=200, Lk=520, D=128, mask="none"),
    "wide": dict(B=1, H=1, Lq=70, Lk=140, D=256, mask="key_padding"),
}


@pytest.mark.parametrize("name", RACES)
def test_bits_do_not_depend_on_the_run(
    name: str, hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits in every order of warps and blocks, and however late asynchronous work ends; but for dq, a sum."""
    p = make(**RACES[name], dtype=BFLOAT16, device=hopper)
    results = []
    for order, completion in SETTINGS:
        monkeypatch.setenv("FASTATTN_HOST_ORDER", order)
        monkeypatch.setenv("FASTATTN_HOST_ASYNC", completion)
        results.append(check(p, hopper, calls, expected=("forward",) if name == "wide" else ("forward", "backward")))
    for other in results[1:]:
        for a, b, what in zip(results[0], other, Results._fields, strict=True):
            assert a is None or what == "dq" or torch.equal(a, b), what


def test_deterministic_where_torch_asks(
    hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(make(Lq=70, Lk=140, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls, expected=("forward",))


def test_repeats_before_a_record(hopper: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "ACCUMULATE_DQ", AS_SHIPPED)
    check(make(Lq=70, Lk=140, mask="causal", dtype=BFLOAT16, device=hopper), hopper, calls, expected=("forward",))


def test_backends_of_two_architectures_are_interchangeable(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward by one, backward by the other: lse and dropout mean the same to both."""
    p = make(Lq=70, Lk=140, D=64, mask="decoder", dropout_p=0.3, dtype=BFLOAT16, device=hopper)
    serves = sm90.serves
    for name, instead in (
        ("serves_backward", lambda *_: False),
        ("serves", lambda *tensors: len(tensors) > 4 and serves(*tensors)),  # of the backward's tensors alone
    ):
        with monkeypatch.context() as changed:
            changed.setattr(sm90, name, instead)
            compare(p, solve(p, room_call("cuda", hopper, weights=False)), FORWARD + GRADIENTS)


def test_other_devices_are_left_alone(device: torch.device, calls: list[str]) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("this GPU is a Hopper")
    check(make(dtype=BFLOAT16, device=device), device, calls, expected=())
    assert room.sm90 is sm90
