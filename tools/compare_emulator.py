"""Runs every CUDA kernel on small problems, on the CPU through csrc/emulator and on the GPU, and compares the results.

    python tools/compare_emulator.py                     both sides
    python tools/compare_emulator.py --only device       the GPU alone: short enough for compute-sanitizer
    ... --backend cuda triton                            also the Triton kernels whose warps share data in shared
                                                         memory; on a CPU in Triton's interpreter
    ... --without-sm90                                   for racecheck, which does not see what wgmma and TMA read

Each side is compared with the reference formula in float64, as in the doctor. "bits equal" counts the results that are
equal on device and host, where nothing is dropped: each draws by its own generator. They are expected to be equal where
a kernel only adds and multiplies, not where it needs exp or a square root. Without a GPU only the host's side runs.
Exit status 1 if a result is out of bounds or a kernel fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import emulator_build
import torch

import fastattn
import fastattn.backends.cuda
from fastattn.check import cases
from fastattn.check.cases import Problem, solve
from fastattn.check.doctor import DTYPES, check

# Sizes at which the kernels switch: chunks and warps of a row, vectors or single elements.
WIDTHS = (7, 64, 100, 264, 520, 1040, 4104, 16384)
HEAD_DIMS = (16, 40, 128, 256)
# Triton ops whose warps share data outside tl.dot: sums over rows by several warps and programs, and logits that
# gradients replace.
SHARED_BY_WARPS = ("add_layer_norm", "add_rms_norm", "linear_cross_entropy")


def cuda_problems(device: torch.device) -> Iterator[Problem]:
    """Small problems, with equal numbers on every device."""
    place: dict[str, Any] = {"device": device, "dtype": torch.float64}
    yield from cases.problems(device, large=False)
    for width in WIDTHS:
        rows = 19 if width < 4096 else 3
        yield cases.add_layer_norm(f"width {width}", rows=(rows,), hidden=width, dropout_p=0.2, **place)
    mask = fastattn.AttentionMask(is_causal=True, align="bottom_right")
    for dim in HEAD_DIMS:
        case = f"head dimension {dim}"
        yield cases.attention(case, B=1, Lq=70, Lk=150, D=dim, attn_mask=mask, dropout_p=0.2, **place)
        blocks = (torch.arange(20).view(4, 5) % 3 > 0).repeat_interleave(64, 0).repeat_interleave(64, 1)
        mask_of_blocks = fastattn.AttentionMask(attn_mask=blocks[:250, :300].to(device))
        yield cases.attention(f"{case}, blocks", B=1, Lq=250, Lk=300, D=dim, attn_mask=mask_of_blocks, **place)


def triton_problems(device: torch.device) -> Iterator[Problem]:
    """The doctor's problems on this device, whose kernels precompile.py has compiled."""
    return (p for p in cases.problems(device) if p.op in SHARED_BY_WARPS or (p.op, p.case) == ("attention", "bias"))


def compare(dtype: torch.dtype, sides: dict[str, Problem], backend: str = "cuda") -> tuple[str, bool]:
    """The outcome of one problem, in words, and whether it is right. sides: the problem on each side's device."""
    for side, problem in sides.items():
        if reason := problem.explain(dtype).refusals[backend]:
            return f"refused by the {side}: {reason}", True
    bad = [
        f"{side}: {record.get('failed') or record['result'] + ' is out of bounds'}"
        for side, problem in sides.items()
        for record in check(problem, dtype, [backend])
        if not record["ok"]
    ]
    if bad or len(sides) == 1 or "dropout_p" in next(iter(sides.values())).options:
        return "; ".join(bad) or "ok", not bad
    host, device = (solve(problem, backend, dtype, dtype) for problem in sides.values())
    equal = sum(torch.equal(host[name].cpu(), device[name].cpu()) for name in host)
    return f"ok, bits equal in {equal} of {len(host)} results", True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--only", choices=("host", "device"), help="one side")
    backends = ("cuda", "triton")
    parser.add_argument("--backend", nargs="+", choices=backends, default=["cuda"], help="whose kernels (cuda)")
    parser.add_argument("--without-sm90", action="store_true", help="use the kernels of sm_80")
    arguments = parser.parse_args()
    devices = {"host": torch.device("cpu")} | ({"device": torch.device("cuda")} if torch.cuda.is_available() else {})
    devices = {side: device for side, device in devices.items() if arguments.only in (None, side)}
    if not devices:
        parser.error("--only device: there is no GPU")
    if "host" in devices and "cuda" in arguments.backend:
        if reason := emulator_build.unsupported_reason():
            parser.error(reason)
        library = emulator_build.build("_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR)
        fastattn.backends.cuda.load_emulator(library)
    if arguments.without_sm90:
        fastattn.backends.cuda._gpu_capability = lambda index: 80
    solved = failed = 0
    for backend in arguments.backend:
        make_problems = cuda_problems if backend == "cuda" else triton_problems
        for given in zip(*map(make_problems, devices.values()), strict=True):
            for dtype in DTYPES:
                outcome, right = compare(dtype, dict(zip(devices, given, strict=True)), backend)
                failed += not right
                solved += not outcome.startswith("refused")
                print(f"{given[0].op}, {given[0].case}, {backend}, {str(dtype)[6:]}: {outcome}", flush=True)
    kernels, where = " and ".join(arguments.backend), " and ".join(devices)
    print(f"{solved} problems solved by the kernels of {kernels} on {where}, {failed} of them wrong")
    return int(failed > 0 or solved == 0)


if __name__ == "__main__":
    sys.exit(main())
