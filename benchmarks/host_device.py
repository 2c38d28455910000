"""Every CUDA room on small problems, on the CPU through csrc/host and on the GPU: one set of sources, one answer.

    python benchmarks/host_device.py [--kept FOLDER]     both, compared
    python benchmarks/host_device.py --only device       the GPU alone: short enough for compute-sanitizer

Each side is judged against the reference formula in float64, as by the doctor; and the device against the host, which
must be as near to each other as the plain formula is to the host. "bits equal" says that nothing differs: expected
where a kernel only adds and multiplies, not where the CPU's exp or square root rounds another way. Without a GPU the
host's half runs, and that is said. Exit status 1 if anything is out of bounds or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fastattn
import fastattn.cuda
from fastattn._dispatch import OPS
from fastattn._problems import Problem, problems, solve
from fastattn.doctor import DTYPES, judge

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))  # host_build.py

RNG_STATE = (0x1234_5678_9ABC_DEF0, 0x1_0000_002A)  # seed and offset of the dropout, on both sides
# Beside the doctor's problems, where the kernels switch: chunks and warps of a row, vectors or single elements.
WIDTHS = (7, 64, 100, 264, 520, 1040, 4104, 16384)
HEAD_DIMS = (16, 40, 128, 256)
CLASSES = (7, 1000, 2061, 50257)
Results = dict[str, torch.Tensor]


def all_problems(device: torch.device) -> Iterator[Problem]:
    """Small problems, with equal numbers on every device."""
    yield from problems(device, large=False)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    for width in WIDTHS:
        rows = 19 if width < 4096 else 3
        tensors = {"x": randn(rows, width), "residual": randn(rows, width)}
        tensors |= {"weight": 1 + 0.1 * randn(width), "bias": 0.1 * randn(width)}
        options = {"dropout_p": 0.2, "eps": 0.01}
        yield Problem("add_layer_norm", f"width {width}", fastattn.dropout_add_layer_norm, tensors, options)
    for dim in HEAD_DIMS:
        tensors = {"query": randn(1, 2, 70, dim), "key": randn(1, 2, 150, dim), "value": randn(1, 2, 150, dim)}
        mask = fastattn.AttentionMask(is_causal=True, align="bottom_right")
        options = {"attn_mask": mask, "dropout_p": 0.2}
        yield Problem("attention", f"head dimension {dim}", fastattn.scaled_dot_product_attention, tensors, options)
    for classes in CLASSES:
        tensors = {"x": randn(3, 16), "weight": 0.5 * randn(classes, 16)}
        options = {"target": torch.arange(3).to(device), "ignore_index": 1, "label_smoothing": 0.1, "reduction": "none"}
        yield Problem("linear_cross_entropy", f"{classes} classes", fastattn.linear_cross_entropy, tensors, options)


@contextlib.contextmanager
def fixed_dropout() -> Iterator[None]:
    """The rng_state is RNG_STATE: a device's own generator would draw another one on each."""
    with contextlib.ExitStack() as stack:
        for op in OPS.values():
            module = sys.modules[op.function.__module__]
            if hasattr(module, "draw_rng_state"):
                fixed = lambda device: torch.tensor(RNG_STATE, dtype=torch.int64, device=device)  # noqa: E731
                stack.enter_context(mock.patch.object(module, "draw_rng_state", fixed))
        yield


def refusal(problem: Problem, dtype: torch.dtype) -> str | None:
    """Why the CUDA room cannot serve a problem."""
    tensors = {name: t.to(dtype) for name, t in problem.tensors.items()}
    return fastattn.explain(problem.op, **tensors, **problem.options).refusals["cuda"]


def orders(problem: Problem) -> list[Callable[..., Any]]:
    """The plain formula, in each order that is honest."""
    functions = [problem.function, problem.other_order] if problem.other_order else [problem.function]
    return [partial(function, backend="reference") for function in functions]


def outside(results: Results, truth: Results, lows: Sequence[Results]) -> list[str]:
    """Which results are out of bounds, by how much."""
    found = []
    for name, wanted in truth.items():
        ratios = [judge(results[name].cpu(), wanted.double(), low[name]).ratio for low in lows]
        found += [f"{name} {min(ratios):.2f} x its bound"] if not min(ratios) <= 1 else []
    return found


def compare(dtype: torch.dtype, sides: Sequence[str], problem: Problem, again: Problem | None) -> tuple[str, bool]:
    """What to say of one problem, and whether all is well. again: the same problem on the device."""
    given = {"host": problem, "device": again}
    if refused := [(side, reason) for side in sides if (reason := refusal(given[side], dtype))]:
        return f"refused by the {refused[0][0]}: {refused[0][1]}", True
    truth = solve(problem, orders(problem)[0], dtype, torch.float64)
    lows = [solve(problem, order, dtype, dtype) for order in orders(problem)]
    results = {}
    for side in sides:
        room = partial(given[side].function, backend="cuda")
        results[side] = {name: t.detach().cpu() for name, t in solve(given[side], room, dtype, dtype).items()}
    said = [f"{side}: {bad}" for side in sides for bad in outside(results[side], truth, lows)]
    if len(sides) == 2:
        host, device = results["host"], results["device"]
        said += [f"device against host: {bad}" for bad in outside(device, host, lows)]
        equal = sum(torch.equal(host[name], device[name]) for name in host)
        return "; ".join(said) or f"ok, bits equal in {equal} of {len(host)} results", not said
    return "; ".join(said) or "ok", not said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("host", "device"), help="one side")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="where the host build is kept (build/host)")
    arguments = parser.parse_args(argv)
    sides = [arguments.only] if arguments.only else ["host", "device"]
    if "device" in sides and not torch.cuda.is_available():
        if arguments.only:
            parser.error("--only device: there is no GPU")
        print("there is no GPU: the device's half is left out")
        sides = ["host"]
    if "host" in sides:
        import host_build

        if reason := host_build.why_not():
            parser.error(reason)
        library = host_build.build("_C", host_build.extension_sources(), arguments.kept or host_build.KEPT)
        fastattn.cuda.load_host_runner(library)
    served = failed = 0
    on_host = all_problems(torch.device("cpu"))
    on_device = all_problems(torch.device("cuda")) if "device" in sides else None
    with fixed_dropout():
        for problem in on_host:
            again = next(on_device) if on_device else None
            for dtype in DTYPES:
                try:
                    said, well = compare(dtype, sides, problem, again)
                except Exception as error:  # the finding, not the end
                    said, well = f"failed: {type(error).__name__}: {error}", False
                failed += not well
                served += not said.startswith("refused")
                print(f"{problem.op}, {problem.case}, {str(dtype)[6:]}: {said}", flush=True)
    print(f"{served} problems solved by the CUDA rooms on {' and '.join(sides)}, {failed} not as they should be")
    return int(failed > 0 or served == 0)


if __name__ == "__main__":
    sys.exit(main())
