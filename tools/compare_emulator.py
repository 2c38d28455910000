"""Every CUDA kernel on small problems, on the CPU through csrc/emulator and on the GPU: one set of sources, one answer.

    python tools/compare_emulator.py                     both, compared
    python tools/compare_emulator.py --only device       the GPU alone: short enough for compute-sanitizer
    ... --backend cuda triton                            after the CUDA kernels, those Triton kernels whose warps meet
                                                         in shared memory; on a CPU in Triton's interpreter
    ... --without-sm90                                   for racecheck, which does not see what wgmma and TMA read

Each side is judged against the reference formula in float64, as by the doctor. "bits equal" says in how many results
the device and the host differ nowhere: expected where a kernel only adds and multiplies, not where the CPU's exp or
square root rounds another way. Without a GPU the host's half runs. Exit status 1 if anything is out of bounds or
fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

import fastattn
import fastattn.backends.cuda
from fastattn.backends import OPS
from fastattn.check.cases import Problem, problems, solve
from fastattn.check.doctor import DTYPES, check

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cuda"))  # emulator_build.py

RNG_STATE = (0x1234_5678_9ABC_DEF0, 0x1_0000_002A)  # seed and offset of the dropout, on both sides
# Beside the doctor's problems, where the kernels switch: chunks and warps of a row, vectors or single elements.
WIDTHS = (7, 64, 100, 264, 520, 1040, 4104, 16384)
HEAD_DIMS = (16, 40, 128, 256)
CLASSES = (7, 1000, 2061, 50257)
# Of Triton, the doctor's problems in these: sums over rows by several warps and programs, and logits that gradients
# replace. Elsewhere a program's warps meet in tl.dot alone.
SHARED_BY_WARPS = ("add_layer_norm", "add_rms_norm", "embed_layer_norm", "linear_cross_entropy")


def all_problems(device: torch.device) -> Iterator[Problem]:
    """Small problems, with equal numbers on every device."""
    of_op = {}
    for problem in problems(device, large=False):
        of_op[problem.op] = problem
        yield problem
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    for width in WIDTHS:
        rows = 19 if width < 4096 else 3
        tensors = {"x": randn(rows, width), "residual": randn(rows, width)}
        tensors |= {"weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        norm = of_op["add_layer_norm"]._replace(case=f"width {width}")
        yield norm._replace(tensors=tensors, options={"dropout_p": 0.2})
    for dim in HEAD_DIMS:
        tensors = {"query": randn(1, 2, 70, dim), "key": randn(1, 2, 150, dim), "value": randn(1, 2, 150, dim)}
        mask = fastattn.AttentionMask(is_causal=True, align="bottom_right")
        attention = of_op["attention"]._replace(case=f"head dimension {dim}")
        yield attention._replace(tensors=tensors, options={"attn_mask": mask, "dropout_p": 0.2})
        cache = {"query": randn(2, 3, 4, dim), "key": randn(2, 600, 3, 2, dim), "value": randn(2, 600, 3, 2, dim)}
        decoding = of_op["decode_attention"]._replace(case=f"head dimension {dim}")
        yield decoding._replace(tensors=cache, options={})
    for classes in CLASSES:
        tensors = {"x": randn(3, 16), "weight": 0.5 * randn(classes, 16), "bias": 0.1 * randn(classes)}
        options = {"target": torch.arange(3).to(device), "ignore_index": 1, "label_smoothing": 0.1}
        options |= {"reduction": "none", "logit_scale": 1.0}
        cross_entropy = of_op["linear_cross_entropy"]._replace(case=f"{classes} classes")
        yield cross_entropy._replace(tensors=tensors, options=options)


def triton_problems(device: torch.device) -> list[Problem]:
    """With the sizes of the doctor on this device, whose kernels precompile.py has compiled."""
    return [p for p in problems(device) if p.op in SHARED_BY_WARPS or (p.op, p.case) == ("attention", "bias")]


@contextlib.contextmanager
def fixed_dropout() -> Iterator[None]:
    """The rng_state is RNG_STATE: a device's own generator would draw another one on each."""
    with contextlib.ExitStack() as stack:
        for op in OPS.values():
            module = sys.modules[op.function.__module__]
            if hasattr(module, "draw_rng_state"):
                fixed = lambda device, backend=None: torch.tensor(RNG_STATE, dtype=torch.int64, device=device)  # noqa: E731
                stack.enter_context(mock.patch.object(module, "draw_rng_state", fixed))
        yield


def compare(dtype: torch.dtype, sides: dict[str, Problem], backend: str = "cuda") -> tuple[str, bool]:
    """What to say of one problem, given on each side's device, and whether all is well."""
    for side, problem in sides.items():
        tensors = {name: t.to(dtype) for name, t in problem.tensors.items()}
        if reason := fastattn.explain(problem.op, **tensors, **problem.options).refusals[backend]:
            return f"refused by the {side}: {reason}", True
    bad = [
        f"{side}: {record.get('failed') or record['result'] + ' is out of bounds'}"
        for side, problem in sides.items()
        for record in check(problem, dtype, [backend])
        if not record["ok"]
    ]
    if bad or len(sides) == 1:
        return "; ".join(bad) or "ok", not bad
    host, device = (solve(problem, backend, dtype, dtype) for problem in sides.values())
    equal = sum(torch.equal(host[name].cpu(), device[name].cpu()) for name in host)
    return f"ok, bits equal in {equal} of {len(host)} results", True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("host", "device"), help="one side")
    parser.add_argument(
        "--backend", nargs="+", choices=("cuda", "triton"), default=["cuda"], help="whose kernels (cuda)"
    )
    parser.add_argument("--without-sm90", action="store_true", help="take the GPU for an sm_80")
    arguments = parser.parse_args(argv)
    devices = {"host": torch.device("cpu")}
    if torch.cuda.is_available():
        devices["device"] = torch.device("cuda")
    else:
        print("there is no GPU: the device's half is left out")
    if arguments.only:
        devices = {side: device for side, device in devices.items() if side == arguments.only}
        if not devices:
            parser.error("--only device: there is no GPU")
    if "host" in devices and "cuda" in arguments.backend:
        import emulator_build

        if reason := emulator_build.unsupported_reason():
            parser.error(reason)
        fastattn.backends.cuda.load_emulator(
            emulator_build.build("_C", emulator_build.extension_sources(), emulator_build.BUILD_DIR)
        )
    if arguments.without_sm90:
        fastattn.backends.cuda._gpu_capability = lambda index: 80  # of this process, which does nothing else
    served = failed = 0
    with fixed_dropout():
        for backend in arguments.backend:
            sides = {
                side: (all_problems if backend == "cuda" else triton_problems)(device)
                for side, device in devices.items()
            }
            for given in zip(*sides.values(), strict=True):
                for dtype in DTYPES:
                    outcome, well = compare(dtype, dict(zip(sides, given, strict=True)), backend)
                    failed += not well
                    served += not outcome.startswith("refused")
                    print(f"{given[0].op}, {given[0].case}, {backend}, {str(dtype)[6:]}: {outcome}", flush=True)
    kernels = " and ".join(arguments.backend)
    where = " and ".join(devices)
    print(f"{served} problems solved by the kernels of {kernels} on {where}, {failed} not as they should be")
    return int(failed > 0 or served == 0)


if __name__ == "__main__":
    sys.exit(main())
