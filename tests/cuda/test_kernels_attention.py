"""What is special about the CUDA attention: its kernels' sizes, memory orders, races and launches.

It runs on the CPU through csrc/emulator, as an A100 and as an H100, and on a GPU where there is one. What every backend
must do: tests/ops.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator_build
import pytest
import torch
from attention_checks import (
    NOT_FINITE_WITHOUT_BIAS,
    Problem,
    Results,
    backend_call,
    check,
    check_not_finite,
    compare,
    expected,
    make,
    make_for_not_finite,
    plain,
    solve,
)
from emulator_build import ORDERS, SM90_COMPLETIONS
from helpers import assert_close_as_torch, round_tf32
from mask_cases import KINDS, prefix
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastattn.backends.cuda
from fastattn import AttentionMask, explain
from fastattn.backends import attention_rows
from fastattn.backends.calls import AttentionCall
from fastattn.backends.cuda import attention as backend

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
full = pytest.mark.full


@pytest.fixture(params=["80", "90"])
def kernels(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, as one of this compute capability: those of 90 are Hopper's own kernels."""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", request.param)
    if device.type == "cuda" and (torch.cuda.get_device_capability(device) == (9, 0)) != (request.param == "90"):
        pytest.skip("this GPU runs the other kernels")
    return device


# What tests/ops/test_attention.py and test_every_op.py compare for the kernels of sm_80, as other GPUs use them.
ON_HOPPER = pytest.mark.parametrize("kernels", ["90"], indirect=True)


def cuda_attention(device: torch.device) -> Callable[..., Any]:
    return backend_call("cuda", device, weights=False)


@ON_HOPPER
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("decoder", "segments_causal", "everything") else full) for k in KINDS]
)
def test_several_tiles(kind: str, kernels: torch.device) -> None:
    """The last of them ragged, some full, some empty; and everything at once. In both, Hopper's forward has a warpgroup
    without queries, of tiles of 192 and of 128."""
    options = dict(mask=kind, dropout_p=0.2 if kind == "decoder" else 0.0, device=kernels)
    check(make(B=2, H=1, Lq=300, Lk=269, D=64, dtype=BFLOAT16, **options), cuda_attention(kernels))
    options = dict(mask=kind, dropout_p=0.3, dlse=False, device=kernels)
    check(make(B=2, H=2, Hk=1, Lq=37, Lk=141, D=72, dtype=FLOAT16, **options), cuda_attention(kernels))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(k, marks=full) for k in ("none", "window", "attn_mask")),
        "key_padding_holes",
        "decoder",
        "segments_causal",
    ],
)
def test_short_sequences(kind: str, kernels: torch.device) -> None:
    """Fewer than two tiles each way, which are ragged."""
    options = dict(B=2, mask=kind, dropout_p=0.2, device=kernels)
    check(make(H=2, Hk=1, Lq=100, Lk=100, D=40, dtype=BFLOAT16, **options), cuda_attention(kernels))
    check(make(H=1, Lq=120, Lk=100, D=72, dtype=FLOAT16, **options), cuda_attention(kernels))
    check(make(H=2, Lq=110, Lk=100, D=96, dtype=FLOAT32, **options), cuda_attention(kernels))


@pytest.mark.few(4)
@pytest.mark.bug_class("T5")
@pytest.mark.parametrize("D, Dv", [(1, 3), (8, 8), (33, 72), (64, 24), (72, 72), (128, 40), (40, 120), (128, 128)])
def test_head_dims(D: int, Dv: int, kernels: torch.device) -> None:
    for dtype in (BFLOAT16, FLOAT32):
        p = make(B=1, H=2, Lq=70, Lk=140, D=D, Dv=Dv, mask="causal_bottom_right", dtype=dtype, device=kernels)
        check(p, cuda_attention(kernels))


@pytest.mark.bug_class("T13")
@ON_HOPPER
@full
@pytest.mark.parametrize(
    "Lq, Lk", [(1, 1), (1, 300), (300, 1), (64, 64), (64, 128), (192, 128), (193, 129), (128, 127), (65, 127)]
)
def test_lengths_at_tile_edges(Lq: int, Lk: int, kernels: torch.device) -> None:
    bottom_right, padded = {"is_causal": True, "align": "bottom_right"}, {"key_padding": prefix([Lk], Lk).to(kernels)}
    # 1e-6 drops nothing, as the rule counts in 65536ths.
    for mask, dropout_p in (({}, 0.0), (bottom_right, 0.0), (padded, 0.0), (bottom_right, 1e-6), ({}, 0.7), ({}, 1.0)):
        options = dict(mask=mask, dropout_p=dropout_p, dtype=BFLOAT16, device=kernels)
        check(make(B=1, H=2, Lq=Lq, Lk=Lk, D=64, **options), cuda_attention(kernels))


@ON_HOPPER
def test_dimensions_of_size_1(kernels: torch.device) -> None:
    """Their strides may be anything; TMA is told what a contiguous tensor would have."""
    for B, H, Lq, Lk in [(1, 1, 1, 1), (2, 2, 1, 9), (2, 2, 9, 1), (1, 2, 9, 9), (2, 1, 9, 9)]:
        p = make(B=B, H=H, Lq=Lq, Lk=Lk, D=64, dtype=BFLOAT16, device=kernels)
        by_position = {name: getattr(p, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
        for problem in (p, p.but(**by_position)):
            check(problem, cuda_attention(kernels))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, kernels: torch.device) -> None:
    """The kernels take the maximum before they scale."""
    for mask in ("none", "everything"):
        p = make(Lq=70, Lk=150, D=64, mask=mask, dtype=BFLOAT16, device=kernels)
        check(p.but(scale=scale), cuda_attention(kernels))
    first, *_ = (AttentionMask().prepare(70, 70, at, kernels) for at in backend.mask_layouts(p.q, p.q, p.q, None))
    sizes, projected = (2, 70, 2, 2, 64, 64), torch.zeros(140, 384, dtype=BFLOAT16, device=kernels)
    with pytest.raises(ValueError, match="the scale must be positive"):
        backend.attention_rows_fwd(projected, (), sizes, first, scale, 0.0, None)


@pytest.mark.parametrize(
    "case, D",
    [
        pytest.param(case, D, marks=() if case == "none" and D == 16 else full)
        for case, D in itertools.product(NOT_FINITE_WITHOUT_BIAS, (16, 128))
    ],
)
def test_nan_and_inf_come_out(case: str, D: int, kernels: torch.device) -> None:
    p = make_for_not_finite(case, 33, 140, D=D, dtype=BFLOAT16, device=kernels)
    check_not_finite(p, backend_call("cuda", kernels))


def views(p: Problem) -> dict[str, Problem]:
    """The same problem in other memory."""

    def by_position(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(t: Tensor, before: int, after: int) -> Tensor:
        wide = t.new_full((*t.shape[:3], before + t.shape[3] + after), torch.nan)
        return wide[..., before : before + t.shape[3]].copy_(t)

    q, k, v = by_position(torch.cat([p.q, p.k, p.v], -1)).split([p.q.shape[3], p.k.shape[3], p.v.shape[3]], -1)
    return {
        "heads inside positions": p.but(q=by_position(p.q), k=by_position(p.k), v=by_position(p.v)),
        "one projection": p.but(q=q, k=k, v=v, dout=by_position(p.dout)),
        "off a boundary": p.but(
            q=inside(p.q, 1, 7), k=inside(p.k, 3, 5), v=inside(p.v, 1, 2), dout=inside(p.dout, 1, 0)
        ),
        "rows apart": p.but(q=inside(p.q, 8, 8), k=inside(p.k, 16, 0), v=inside(p.v, 0, 8)),
        "one sample for all": p.but(k=p.k[:1].expand_as(p.k), v=p.v[:1].expand_as(p.v)),
    }


@pytest.mark.bug_class("T2", "T3", "T4", "T5")
@ON_HOPPER
@pytest.mark.parametrize("mask", [pytest.param("causal", marks=full), "attn_mask"])
def test_memory_orders(mask: str, kernels: torch.device) -> None:
    """Strided tensors are not copied. Those that Hopper's kernels cannot read are read by the other kernels."""
    p = make(B=2, H=2, Lq=150, Lk=150, D=16, dtype=BFLOAT16, mask=mask, device=kernels)
    for name, other in views(p).items():
        result = check(other, cuda_attention(kernels))
        assert result.out.stride() == torch.empty_like(other.q).stride() or name in ("off a boundary", "rows apart")


@pytest.mark.parametrize("L", [70, 150])
def test_gradients_in_given_tensors(L: int, kernels: torch.device) -> None:
    """In one tensor, in the order that the product after it reads: equal bits."""
    p = make(B=2, H=2, Lq=L, Lk=L, D=24, mask="causal", dtype=BFLOAT16, device=kernels)
    mask = AttentionMask(**p.mask)
    masks = mask.prepare_all(L, L, backend.mask_layouts(p.q, p.k, p.v, None), kernels)
    given = AttentionCall(p.q, p.k, p.v, None, None, masks, p.scale)
    out, lse = backend.attention_fwd(given)
    call = p.dout, None, given._replace(masks=masks[1:]), out, lse, False
    expected = backend.attention_bwd(*call)[:3]
    joined = torch.full((2, L, 3, 2, 24), torch.nan, dtype=BFLOAT16, device=kernels)
    grads = joined.permute(2, 0, 3, 1, 4).unbind()
    given = backend.attention_bwd(*call, grads)[:3]
    assert all(a is b and torch.equal(a, c) for a, b, c in zip(given, grads, expected, strict=True))


def by_columns(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.few(3)
@pytest.mark.parametrize("L", [70, 150])
@pytest.mark.parametrize("shift", [None, 0, 1, "columns"])
def test_rows(shift: int | str | None, L: int, kernels: torch.device) -> None:
    """Heads in rows give equal bits. shift: of a memory of keys and values, where there is one. With 1 it is copied,
    and so are contiguous columns."""
    sizes = B, L, H, Hk, Dk, Dv = 2, L, 4, 2, 16, 24
    mask, width = AttentionMask(is_causal=True), H * Dk + (Hk * (Dk + Dv) if shift is None else 0)
    torch.manual_seed(0)
    projected, dout = (torch.randn(B * L, n, dtype=BFLOAT16, device=kernels) for n in (width, H * Dv))
    wide = torch.randn(B, L, 2 * Hk * (Dk + Dv), dtype=BFLOAT16, device=kernels)
    begin = 0 if shift == "columns" else shift
    memory = [] if shift is None else wide[..., begin : begin + Hk * (Dk + Dv)].split([Hk * Dk, Hk * Dv], 2)
    q, k, v = attention_rows.heads(projected, memory, sizes)
    memory = [by_columns(t) for t in memory] if shift == "columns" else memory
    first, *others = (mask.prepare(L, L, layout, kernels) for layout in backend.mask_layouts(q, k, v, None))
    out, lse = backend.attention_rows_fwd(projected, memory, sizes, first, 0.25, 0.0, None)
    heads_call = AttentionCall(q, k, v, None, None, [first], 0.25)
    expected, expected_lse = backend.attention_fwd(heads_call)
    assert torch.equal(out, expected.transpose(1, 2).reshape(out.shape)) and torch.equal(lse, expected_lse)
    dprojected, *dmemory = (
        torch.full(t.shape, torch.nan, dtype=BFLOAT16, device=kernels) for t in (projected, *memory)
    )
    call = dout, projected, memory, out, lse, dprojected
    options = sizes, others, 0.25, 0.0, None
    backend.attention_rows_bwd(*call, dmemory, *options)
    if shift == "columns":  # a copy would be lost
        with pytest.raises(ValueError, match="cannot read or write in these strides"):
            backend.attention_rows_bwd(*call, [by_columns(t) for t in dmemory], *options)
    dheads = dout.view(B, L, H, Dv).transpose(1, 2)
    grads = backend.attention_bwd(dheads, None, heads_call._replace(masks=others), expected, lse, False)
    for given, expected in zip(attention_rows.heads(dprojected, dmemory, sizes), grads, strict=False):
        assert torch.equal(given, expected)


@pytest.mark.bug_class("T19")
@full
@pytest.mark.parametrize("D", [40, 128])
def test_nothing_is_written_elsewhere(D: int, kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are views of larger tensors. Nothing around them changes."""
    around: list[tuple[Tensor, tuple[slice, ...]]] = []

    def inside(x: Tensor, head_dim: int) -> Tensor:
        B, H, L, _ = x.shape
        whole = torch.full((B, H + 2, L + 64, head_dim + 24), 7.0, dtype=x.dtype, device=x.device)
        place = slice(None), slice(1, -1), slice(32, -32), slice(8, 8 + head_dim)
        around.append((whole, place))
        return whole[place].fill_(torch.nan)

    monkeypatch.setattr(backend, "_empty_like", inside)
    check(make(B=2, H=2, Lq=70, Lk=140, D=D, mask="causal", dtype=BFLOAT16, device=kernels), cuda_attention(kernels))
    assert len(around) == 4  # out, dq, dk, dv
    for whole, place in around:
        rest = whole.detach().clone()
        rest[place] = 7.0
        assert (rest == 7.0).all()


RACES = {
    "masked": dict(B=1, H=2, Lq=50, Lk=270, D=64, mask="decoder", dropout_p=0.2),
    "full": dict(B=1, H=1, Lq=200, Lk=520, D=128, mask="none"),
    "short": dict(B=1, H=2, Lq=90, Lk=70, D=40, mask="key_padding", dropout_p=0.2),
    **{f"grouped, {kind}": dict(B=1 if kind == "segments_causal" else 2, H=2, Hk=1, Lq=200, Lk=270, D=D, mask=kind,
                                dropout_p=p, dtype=FLOAT16)
       for D, kind, p in ((64, "decoder", 0.2), (96, "everything", 0.2), (128, "none", 0.0),
                          (40, "segments_causal", 0.2))},
}  # fmt: skip


def in_every_setting(p: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Results]:
    for order, completion in itertools.product(ORDERS, SM90_COMPLETIONS):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
        yield solve(p, cuda_attention(device))


@pytest.mark.bug_class("T7", "T8")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "masked" else full) for n in RACES])
def test_bits_do_not_depend_on_the_run(name: str, kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits in every order of warps and blocks, and however late asynchronous work ends."""
    p = make(**{"dtype": BFLOAT16} | RACES[name], device=kernels)
    first, *others = in_every_setting(p, kernels, monkeypatch)
    compare(p, first)
    for other in others:
        for a, b, what in zip(first, other, Results._fields, strict=True):
            assert a is None or torch.equal(a, b), what


@pytest.mark.bug_class("T13")
@full
@pytest.mark.parametrize("D, kind", [(64, "decoder"), (96, "everything"), (128, "none"), (40, "segments_causal")])
def test_very_negative_lse(D: int, kind: str, kernels: torch.device) -> None:
    """The last tile of keys is ragged, and exp(0 - lse) past the end overflows 16 bits."""
    p = make(
        B=1 if kind == "segments_causal" else 2, Hk=1, Lq=200, Lk=270, D=D, mask=kind, dtype=FLOAT16, device=kernels
    )
    mean = p.k.mean(2, keepdim=True)
    result = solve(p.but(q=-4 * mean.expand_as(p.q).sign(), k=8 * mean.sign() + p.k / 8), cuda_attention(kernels))
    assert result.lse.min() < -11 and result.dq.isfinite().all()


class NoWait(TorchDispatchMode):
    """To read a tensor on the host, which would wait for the device, is an error. Keeps the tensors made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"), name
        result = func(*args, **(kwargs or {}))
        self.made += [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result


@pytest.mark.parametrize("kernels", ["90"], indirect=True)
def test_turns(kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each entry of the lists, how many earlier tiles of keys list its tile of queries. A warp reads 32 entries at
    a time, and a block has 32 tiles of keys."""
    Lq, Lk = 2200, 4300
    visible = torch.rand(2, 1, 35, 34, generator=torch.Generator().manual_seed(0)) < 0.03
    visible[0, :, :, 20] = True
    visible = visible.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :Lq, :Lk].to(kernels)
    p = make(B=2, H=1, Lq=Lq, Lk=Lk, D=72, mask={"attn_mask": visible}, dtype=BFLOAT16, device=kernels)
    layouts = backend.mask_layouts(p.q, p.k, p.v, None)
    masks = AttentionMask(**p.mask).prepare_all(Lq, Lk, layouts[1:], kernels)
    out, lse = torch.zeros_like(p.dout), torch.zeros(2, 1, Lq, device=kernels)
    made = []
    monkeypatch.setattr(backend, "_work", lambda *a, make=backend._work: made.append(make(*a)) or made[0])
    with NoWait():
        backend.attention_bwd(p.dout, None, AttentionCall(p.q, p.k, p.v, None, None, masks, 1.0), out, lse, False)
    tiles = masks[1].tiles.long()
    turns = made[0][-tiles.numel() :].view(torch.int32).view_as(tiles)
    is_listed = torch.arange(tiles.shape[3], device=kernels) < masks[1].counts[..., 1:]
    tiles = tiles.where(is_listed, 0)
    listed = torch.zeros_like(tiles).scatter_add_(3, tiles, is_listed.long())
    before = (listed.cumsum(2) - listed).gather(3, tiles)
    assert listed.shape[2] > 32 and listed.sum(3).max() > 32
    assert torch.equal(turns[is_listed].long(), before[is_listed])


@pytest.mark.bug_class("T17")
def test_tf32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch allows tf32, the inputs are rounded to it, and so are the weights before they meet v."""
    p = make(Lq=70, Lk=90, D=40, mask="everything", device=device)
    before = solve(p, cuda_attention(device), needs="")
    monkeypatch.setattr(backend, "uses_tf32", lambda: True)
    rounded = p.but(q=round_tf32(p.q), k=round_tf32(p.k), v=round_tf32(p.v))
    result = solve(p, cuda_attention(device), needs="")
    assert not torch.equal(result.out, before.out)
    compare(rounded, result, ("lse",))
    low = (plain(rounded).weights.bfloat16().float() @ rounded.v).float()  # 8 bits of weight where tf32 has 11
    truth, _, scale = expected(rounded)["out"]
    assert_close_as_torch(result.out, truth, low, scale)


@full
def test_a_thread_that_has_not_used_cuda(kernels: torch.device) -> None:
    """Tensor maps need a context: the emulator refuses to make them without one."""
    p, found = make(Lq=70, Lk=140, D=64, dtype=BFLOAT16, device=kernels), []
    thread = threading.Thread(target=lambda: found.append(solve(p, cuda_attention(kernels))))
    thread.start()
    thread.join()
    compare(p, found[0])


def test_explained_and_refused(device: torch.device) -> None:
    """A call must name it, because no GPU has timed it yet."""
    q = torch.empty(1, 1, 4, 16, device=device)
    explanation = explain("attention", q, q, q, is_causal=True)
    assert explanation.refusals["cuda"] is None and explanation.chosen != "cuda"
    for mask in (torch.zeros(4, 4, device=device), AttentionMask(relative_bias=torch.zeros(1, 7, device=device))):
        assert "takes no bias" in explain("attention", q, q, q, mask).refusals["cuda"]
    assert "takes no softcap" in explain("attention", q, q, q, softcap=2.0).refusals["cuda"]


# --- launches, which csrc/emulator records and does not run -----------------------------------------------------------


@pytest.fixture
def launches(emulator_library: Path) -> Callable[..., Any]:
    """launches(capability, problem): (kernel, blocks, threads, bytes of shared memory) of its forward and of its
    backward, and the sizes of what they allocate."""
    Launches = list[tuple[int, ...]]

    def run(capability: int, p: Problem) -> tuple[Launches, Launches, list[int]]:
        mask, (Lq, Lk) = AttentionMask(**p.mask), p.shape[2:]
        out, lse, noted = torch.zeros_like(p.dout), torch.zeros(p.q.shape[:3]), []
        rng_state = torch.zeros(2, dtype=torch.int64) if p.dropout_p > 0 else None
        with emulator_build.recording(emulator_library, capability) as take_launches, NoWait() as watch:
            masks = mask.prepare_all(Lq, Lk, backend.mask_layouts(p.q, p.k, p.v, None), p.q.device)
            call = AttentionCall(p.q, p.k, p.v, None, rng_state, masks, p.scale, p.dropout_p)
            watch.made.clear()
            backend.attention_fwd(call)
            noted.append(take_launches())
            backend.attention_bwd(p.dout, p.dlse, call._replace(masks=masks[1:]), out, lse, False)
            noted.append(take_launches())
        return *noted, [t.numel() for t in watch.made]

    return run


def test_too_few_registers(emulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another nvcc may give a kernel fewer than it redistributes. That would hang; it raises instead."""
    fastattn.backends.cuda.load_emulator(shutil.copy(emulator_library, tmp_path))  # it asks about each kernel once
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", "90")

    def run(registers: int, D: int = 64, **options: Any) -> None:
        monkeypatch.setenv("FASTATTN_EMULATOR_REGISTERS", str(registers))
        solve(make(B=1, H=1, Lq=150, Lk=130, D=D, dtype=BFLOAT16, **options), cuda_attention(torch.device("cpu")))

    def refused(kernel: str, registers: int, needed: int, **options: Any) -> None:
        said = f"{kernel} starts with {registers} registers a thread and needs {needed}, .* another nvcc, .*triton"
        with pytest.raises(RuntimeError, match=said):
            run(registers, **options)

    try:
        refused("forward_sm90_kernel", 120, 128)
        refused("forward_sm90_kernel", 160, 168, D=128)
        refused("backward_dkdv_sm90_kernel", 160, 168)
        run(161)  # a warp gets them by eights a thread
    finally:
        fastattn.backends.cuda.load_emulator(None)


@pytest.mark.bug_class("T21")
def test_99_kib_of_shared_memory(launches: Callable[..., Any]) -> None:
    """That is what sm_86, sm_89 and sm_120 have: every kernel fits, or another one is used."""
    largest = 0
    for dtype, D, L in itertools.product(DTYPES, (64, 128), (64, 128, 200)):
        forward, backward, _ = launches(86, make(B=1, H=2, Lq=L, Lk=L, D=D, mask="decoder", dtype=dtype))
        largest = max(largest, *(shared for *_, shared in forward + backward))
    assert 48 << 10 < largest <= 99 << 10
