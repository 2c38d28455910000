"""What is special about the CUDA kernels: Hopper's, memory orders, alignment, races, launches.

They run on the CPU through csrc/emulator, as an A100 and as an H100, and on a GPU where there is one. Guard zones are
around what they write. Every size on an A100 and what holds for every backend: tests/ops.
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import catalogue
import emulator_build
import pytest
import torch
from catalogue import FOR_CUDA, SIZES, check, for_backend, judge, make, sized
from emulator_build import ORDERS, SM90_COMPLETIONS
from helpers import assert_close_as_torch, round_tf32, run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn.backends.cuda
from fastattn import AttentionMask, explain
from fastattn.backends import attention_rows
from fastattn.backends.calls import AttentionCall
from fastattn.backends.cuda import add_layer_norm as norm
from fastattn.backends.cuda import attention as backend
from fastattn.check import cases
from fastattn.check.cases import Problem, solve

FP32, BF16, FP16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
full = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["80", "90"])
def kernels(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, as one of this compute capability: those of 90 are Hopper's own kernels."""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", request.param)
    if device.type == "cuda" and (torch.cuda.get_device_capability(device) == (9, 0)) != (request.param == "90"):
        pytest.skip("this GPU runs the other kernels")
    return device


ON_HOPPER = pytest.mark.parametrize("kernels", ["90"], indirect=True)


# --- Hopper's kernels compute what those of an A100 compute in tests/ops ----------------------------------------------


@ON_HOPPER
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "cuda-90" in row.everyday else full)
        for name, row in SIZES["attention"].items()
        if "cuda" in row.backends and row.arguments.get("dtype", FP32) != FP32
    ],
)
def test_against_float64(name: str, kernels: torch.device) -> None:
    check(for_backend(sized("attention", name, kernels), "cuda"), "cuda")


@full
def test_every_property() -> None:
    options = "-q", "-p", "no:cacheprovider", "-k", "cuda and attention"
    run_python("-m", "pytest", *options, ROOT / "tests/ops", FASTATTN_EMULATOR_CAPABILITY="90")


@full
def test_a_thread_that_has_not_used_cuda(kernels: torch.device) -> None:
    """Tensor maps need a context: the emulator refuses to make them without one."""
    p, found = make("attention", Lq=70, Lk=140, D=64, dtype=BF16, device=kernels), []
    thread = threading.Thread(target=lambda: found.append(solve(p, "cuda")))
    thread.start()
    thread.join()
    judge(p, found[0])


@ON_HOPPER
def test_too_few_registers(
    kernels: torch.device, emulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another nvcc may give a kernel fewer than it redistributes. That would hang; it raises instead."""
    if kernels.type != "cpu":
        pytest.skip("a GPU's kernels have the registers that they need")
    fastattn.backends.cuda.load_emulator(shutil.copy(emulator_library, tmp_path))  # it reads each kernel's limits once

    p = cases.attention(B=1, H=1, Lq=150, Lk=130, D=64, dtype=BF16)
    for kernel, registers, needed in (("forward_sm90_kernel", 120, 128), ("backward_dkdv_sm90_kernel", 160, 168)):
        monkeypatch.setenv("FASTATTN_EMULATOR_REGISTERS", str(registers))
        said = f"{kernel} starts with {registers} registers a thread and needs {needed}, .* another nvcc, .*triton"
        with pytest.raises(RuntimeError, match=said):
            solve(p, "cuda")
    monkeypatch.setenv("FASTATTN_EMULATOR_REGISTERS", "161")  # a warp gets them by eights a thread
    solve(p, "cuda")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [None, 0, pytest.param(1, marks=full)])
def test_rows(shift: int | None, kernels: torch.device) -> None:
    """Heads in rows give equal bits. shift: of a memory of keys and values, where there is one. With 1 it is copied."""
    sizes = B, L, H, Hk, Dk, Dv = 2, 70, 2, 1, 16, 24
    mask, width = AttentionMask(is_causal=True), H * Dk + (Hk * (Dk + Dv) if shift is None else 0)
    projected, dout = (torch.randn(B * L, n, dtype=BF16, device=kernels) for n in (width, H * Dv))
    wide = torch.randn(B, L, 2 * Hk * (Dk + Dv), dtype=BF16, device=kernels)
    memory = [] if shift is None else wide[..., shift : shift + Hk * (Dk + Dv)].split([Hk * Dk, Hk * Dv], 2)
    q, k, v = attention_rows.heads(projected, memory, sizes)
    mask_of_forward, *masks = (mask.prepare(L, L, layout, kernels) for layout in backend.mask_layouts(q, k, v, None))
    out, lse = backend.attention_rows_fwd(projected, memory, sizes, mask_of_forward, 0.25, 0.0, None)
    heads_call = AttentionCall(q, k, v, None, None, [mask_of_forward], 0.25)
    expected, expected_lse = backend.attention_fwd(heads_call)
    assert torch.equal(out, expected.transpose(1, 2).reshape(out.shape)) and torch.equal(lse, expected_lse)
    dprojected, *dmemory = (torch.full(t.shape, torch.nan, dtype=BF16, device=kernels) for t in (projected, *memory))
    backend.attention_rows_bwd(dout, projected, memory, out, lse, dprojected, dmemory, sizes, masks, 0.25, 0.0, None)
    dheads = dout.view(B, L, H, Dv).transpose(1, 2)
    grads = backend.attention_bwd(dheads, None, heads_call._replace(masks=masks), expected, lse, False)
    for given, expected in zip(attention_rows.heads(dprojected, dmemory, sizes), grads, strict=False):
        assert torch.equal(given, expected)


OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {"B": 1, "H": 1, "Lq": 40, "Lk": 70, "mask": "causal"}),
    "norm": ("add_layer_norm", {**FOR_CUDA, "rows": (6,), "hidden": 64, "weight_dtype": FP32}),
    "wide norm": ("add_layer_norm", {**FOR_CUDA, "rows": (6,), "hidden": 1040}),
    "feed-forward": ("feed_forward", {"activation": "gelu", "tokens": (70,), "d": 40, "d_ff": 72, "dropout_p": 0.3}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("attention", "norm") else full) for name in OFF]
)
def test_off_a_boundary(name: str, kernels: torch.device) -> None:
    """Each tensor in turn, and all of them, begin at an address that 16 does not divide. What Hopper's kernels cannot
    read so is read by the other kernels. More layouts: tests/ops."""
    op, arguments = OFF[name]
    p = make(op, **arguments, dtype=BF16, device=kernels)

    def moved(t: Tensor) -> Tensor:
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    for names in (*([name] for name in p.tensors), [*p.tensors]):
        check(p.but(**{name: moved(p.tensors[name]) for name in names}), "cuda")


# --- races: equal bits in every order of warps, lanes and blocks, and however late asynchronous work ends -------------


def in_every_setting(run: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, is_sm90: bool) -> None:
    results = []
    for order, completion in itertools.product(ORDERS, SM90_COMPLETIONS if is_sm90 else ("eager",)):
        monkeypatch.setenv("FASTATTN_EMULATOR_ORDER", order)
        monkeypatch.setenv("FASTATTN_EMULATOR_ASYNC", completion)
        results.append(run())
    for other in (*results[1:], run()):
        assert all(torch.equal(results[0][name], other[name]) for name in other)


# More blocks, warps and turns than one: 37 rows are more than two multiprocessors take at once, and not a multiple of a
# block's rows.
RACES: dict[str, tuple[str, dict[str, Any]]] = {
    "masked": ("attention", {"B": 1, "H": 1, "Lq": 50, "Lk": 270, "D": 64, "mask": "decoder", "dropout_p": 0.2}),
    "full": ("attention", {"B": 1, "H": 1, "Lq": 200, "Lk": 520, "D": 128}),
    "short": ("attention", {"B": 1, "Lq": 90, "Lk": 70, "D": 40, "mask": "key_padding", "dropout_p": 0.2}),
    "grouped": ("attention", {"Hk": 1, "Lq": 200, "Lk": 270, "D": 96, "mask": "everything", "dropout_p": 0.2,
                              "dtype": FP16}),
    "blocks": ("attention", SIZES["attention"]["blocks"].arguments),
    "norm": ("add_layer_norm", {**FOR_CUDA, "rows": (37,), "hidden": 520, "dtype": FP32}),
    "narrow norm": ("add_layer_norm", {"rows": (37,), "hidden": 64, "return_sum": True, "dtype": FP32}),
    "wide norm": ("add_layer_norm", {**FOR_CUDA, "rows": (19,), "hidden": 1040}),
    "feed-forward": ("feed_forward", {"activation": "reglu", "tokens": (140,), "d": 40, "d_ff": 264, "d_out": 40,
                                      "dropout_p": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("masked", "norm") else full) for n in RACES])
def test_bits(name: str, kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments = RACES[name]
    p = make(op, **{"dtype": BF16} | arguments, device=kernels)
    judge(p, solve(p, "cuda"))
    in_every_setting(lambda: solve(p, "cuda"), monkeypatch, op == "attention")


@full
@pytest.mark.parametrize("blocks", [17, 37])
def test_weight_gradients_of_many_blocks(blocks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and broken groups of the blocks that add their sums up. A GPU has more blocks than the emulator."""

    class Blocks:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: grid) if name == "add_layer_norm_bwd_grid" else getattr(extension, name)

    grid = blocks, blocks + -(-blocks // 17)  # rows of partial sums: csrc/add_layer_norm/add_layer_norm.h
    extension = norm.extension(device.type == "cuda")
    monkeypatch.setattr(norm, "extension", lambda _: Blocks())
    check(cases.add_layer_norm(rows=(9 * blocks + 2,), hidden=40, **FOR_CUDA, device=device), "cuda")


# --- numbers ----------------------------------------------------------------------------------------------------------


@full
@pytest.mark.parametrize("D, kind", [(64, "decoder"), (128, "none")])
def test_very_negative_lse(D: int, kind: str, kernels: torch.device) -> None:
    """The last tile of keys is ragged, and exp(0 - lse) past the end overflows 16 bits."""
    p = make("attention", Hk=1, Lq=200, Lk=270, D=D, mask=kind, dtype=FP16, device=kernels)
    q, k = p.tensors["query"], p.tensors["key"]
    mean = k.mean(2, keepdim=True)
    result = solve(p.but(query=-4 * mean.expand_as(q).sign(), key=8 * mean.sign() + k / 8), "cuda")
    assert result["out[1]"].min() < -11 and result["grad of query"].isfinite().all()


def test_tf32(device: torch.device) -> None:
    """Where torch allows tf32, the inputs are rounded to it, and so are the weights before they meet v."""
    p = make("attention", Lq=70, Lk=90, D=40, mask="everything", device=device)
    p = p._replace(differentiable=False)
    before = solve(p, "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        result = solve(p, "cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert not torch.equal(result["out"], before["out"])
    rounded = p._replace(tensors={name: round_tf32(t) for name, t in p.tensors.items()})
    judge(rounded, result, ["out[1]"])
    weights = solve(rounded.but(return_weights=True), catalogue.FORMULAS["attention"])["out[2]"]
    low = weights.bfloat16().float() @ rounded.tensors["value"]  # 8 bits of weight where tf32 has 11
    truth, _, scale = cases.expected_results(rounded, formula=catalogue.FORMULAS["attention"])["out"]
    assert_close_as_torch(result["out"], truth, low, scale)


# --- what is refused, and launches, which csrc/emulator records and does not run --------------------------------------


def test_refuses_what_it_has_no_code_for(device: torch.device) -> None:
    q = torch.empty(1, 1, 4, 16, device=device)
    for mask in (torch.zeros(4, 4, device=device), AttentionMask(relative_bias=torch.zeros(1, 7, device=device))):
        assert "takes no bias" in explain("attention", q, q, q, mask).refusals["cuda"]
    assert "takes no softcap" in explain("attention", q, q, q, softcap=2.0).refusals["cuda"]


@pytest.mark.parametrize(
    "capability, driver, problem",
    [
        (80, 0, "no NVIDIA driver"),
        (80, 12090, "fastattn._C was built with CUDA 13.1, the driver supports CUDA up to 12.9"),
        (75, 13010, "need compute capability 8.0, got 7.5"),
        *((capability, 13000, "") for capability in (80, 89, 90)),
        (100, 13010, "no code for compute capability 10.0: install fastattn again with FASTATTN_CUDA_ARCHS=100"),
        (120, 13000, "13.1, has only PTX for compute capability 12.0, and the driver supports CUDA up to 13.0: .*=120"),
        (120, 13010, ""),
    ],
)
def test_which_gpus_it_has_code_for(
    capability: int, driver: int, problem: str, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator says that it was built with CUDA 13.1, for 8.0 and 9.0, with PTX from 11.0 on."""
    monkeypatch.setenv("FASTATTN_EMULATOR_CAPABILITY", str(capability))
    monkeypatch.setenv("FASTATTN_EMULATOR_DRIVER", str(driver))
    found = fastattn.backends.cuda.extension(on_gpu=False).device_problem(0)
    assert re.search(problem, found) if problem else found == ""


class NoWait(TorchDispatchMode):
    """To read a tensor on the host, which would wait for the device, is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


def large_calls() -> Iterator[Problem]:
    """Every kernel, in the sizes with the most shared memory."""
    for dtype, tf32 in ((FP32, False), (BF16, False), (FP16, False), (FP32, True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        masks = ("causal", 0.1), ("key_padding", 0.0), ("attn_mask", 0.1), ("attn_mask", 0.0)
        for D, (mask, dropout_p) in itertools.product((64, 128), masks):
            yield make("attention", Lq=200, Lk=200, D=D, dropout_p=dropout_p, mask=mask, dtype=dtype)
        widths = (64, 512, 1024, 4096, 8192, 16384, 63, 511, 16383)  # odd ones: no vectors
        for hidden, weight_dtype in itertools.product(widths, {dtype, FP32}):
            given = {"hidden": hidden, "weight_dtype": weight_dtype, "x_bias": hidden <= 8192, "dropout_p": 0.1}
            yield make("add_layer_norm", rows=(4,), dtype=dtype, **given)
        for d_ff in (56, 299):
            yield make("feed_forward", activation="swiglu", tokens=(150,), d_ff=d_ff, dtype=dtype, dropout_p=0.1)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_launches(capability: int, emulator_library: Path, request: pytest.FixtureRequest) -> None:
    """All GPUs but Hopper run the kernels of sm_80. A block has 99 KiB of shared memory on sm_86, 89 and 120, 163 on an
    A100; the emulator refuses a launch that needs more. And no call waits for the device."""
    largest = 0
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    with emulator_build.recording(emulator_library, capability) as take_launches:
        for p in large_calls():
            take_launches()
            with NoWait():
                solve(p, "cuda")
            launches = take_launches()
            assert launches
            largest = max(largest, *(shared for *_, shared in launches))
    assert largest > 48 << 10  # which needs no permission
