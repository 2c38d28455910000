"""Searches the tile sizes of Triton's attention on the GPU of this machine, and prints those to write into its table,
kernels/attention/tile_sizes.py. Norms and feed-forwards have rules in place of tables.

    python tools/search_tiles.py [--minutes N]

Every candidate first solves a small problem and is compared with float64, as in the doctor. A candidate that is wrong,
or does not compile or launch, is rejected with its reason. The others are timed on a large problem, as in the
benchmarks, in samples that alternate with those of the tile in the table. A row changes only where the new tile is
faster by 3 %. The candidates are compiled first, in one process for each core, into Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from precompile import compile_slice, over_cores

from fastattn.check import cases
from fastattn.check.cases import Problem
from fastattn.check.doctor import check, positive_number

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import timing  # noqa: E402

GAIN = 1.03  # how many times as fast a new tile must be
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
Tile = tuple[int, ...]


class Row(NamedTuple):
    """One row of the table. `checked` is a small problem with ragged tiles, `timed` a large one.

    Both have equal flags, head dimensions and widths. Their other sizes are multiples of 16 in both or in neither, so
    Triton compiles one kernel for both. direction: what is timed, "forward" or "backward". use(tile): a context in
    which launches use this tile.
    """

    name: str
    dtype: torch.dtype
    checked: Callable[[], Problem]
    timed: Callable[[], Problem]
    direction: str
    current: Tile
    candidates: Sequence[Tile]
    use: Callable[[Tile], AbstractContextManager]


def table(device: torch.device, arch: int) -> Iterator[Row]:
    """The rows of the table, on problems as in training."""
    config = importlib.import_module("fastattn.kernels.attention.tile_sizes")  # the package has a function of that name
    from fastattn.kernels.common import launch

    kernels = ("forward", "dq", "dkv", "dbias")
    for dtype, head_dim, kernel in itertools.product((BFLOAT16, FLOAT32), (64, 128, 256), kernels):
        # Exact float32 has no tensor cores and needs small tiles. 16-bit matrix products need 64 rows or columns.
        sizes, stages = ((16, 32, 64), (1, 2)) if dtype == FLOAT32 else ((32, 64, 128), (2, 3, 4))
        grid = itertools.product(sizes, sizes, (4, 8), stages)

        def problem(B: int, H: int, L: int, D: int = head_dim, has_bias: bool = kernel == "dbias") -> Problem:
            bias = (1, H, L, L) if has_bias else None
            return cases.attention(B=B, H=H, Lq=L, Lk=L, D=D, bias=bias, is_causal=True, device=device)

        @contextlib.contextmanager
        def use(tile: Tile, kernel: str = kernel) -> Iterator[None]:
            look_up = config._look_up
            chosen = lambda name, *rest: tile if name == kernel else look_up(name, *rest)  # noqa: E731
            with mock.patch.object(config, "_look_up", chosen):
                launch.forget()  # launches remember the tile of a class of calls
                yield

        yield Row(
            f"attention {kernel}, {dtype}, D {head_dim}".replace("torch.", ""),
            dtype,
            checked=partial(problem, 2, 2, 336),
            timed=partial(problem, 4, 8, 1024 if dtype == FLOAT32 or kernel == "dbias" else 4096),
            direction="forward" if kernel == "forward" else "backward",
            current=config._look_up(kernel, arch, dtype, head_dim, False),
            candidates=[config.Config(*tile) for tile in grid if max(tile[:2]) > sizes[0]],
            use=use,
        )


def make_step(row: Row, tile: Tile, problem: Callable[[], Problem]) -> Callable[[], Any]:
    """The call to time, with this tile."""
    given, saved = problem(), []
    leaves = {name: t.to(row.dtype).requires_grad_() for name, t in given.tensors.items()}

    def forward() -> torch.Tensor:
        with row.use(tile):
            return given.function(**leaves, **given.options, backend="triton")

    def backward() -> Any:
        if not saved:
            out = forward()
            saved[:] = out, torch.randn_like(out)
        with row.use(tile):
            return torch.autograd.grad(saved[0], list(leaves.values()), saved[1], retain_graph=True)

    return forward if row.direction == "forward" else backward


def try_tile(row: Row, tile: Tile, device: torch.device) -> tuple[float, str]:
    """How many times as fast as the table's tile a candidate is, 0 if it cannot be used; and the outcome in words."""
    try:
        with row.use(tile):
            bad = [record for record in check(row.checked(), row.dtype, ["triton"]) if not record["ok"]]
        if bad:
            return 0.0, bad[0].get("failed") or "wrong: " + ", ".join(record["result"] for record in bad)
        calls = [make_step(row, used, row.timed) for used in (tile, row.current)]
        new, table = timing.measure_in_turn(calls, device, budget_s=0.2)
    except Exception as error:  # a tile that cannot be compiled or launched at the large size
        return 0.0, f"{type(error).__name__}: {error}"
    speed = table.median_ms / new.median_ms
    return speed, f"{speed:.3f} x the speed, {new.median_ms:.4f} ms"


def search(row: Row, device: torch.device, deadline: float) -> Tile:
    """Try all candidates that there is time for, and print the outcomes. Returns the tile to write into the table."""
    best, most = tuple(row.current), GAIN
    print(f"\n{row.name}, in the table: {best}", flush=True)
    for tile in row.candidates:
        if tuple(tile) != tuple(row.current) and time.monotonic() < deadline:
            speed, said = try_tile(row, tile, device)
            print(f"  {tuple(tile)}: {said.splitlines()[0][:200]}", flush=True)
            if speed >= most:
                best, most = tuple(tile), speed
    print(f"  {'unchanged' if best == tuple(row.current) else 'NEW'}: {best}", flush=True)
    return best


def candidates_jobs(arch: int) -> list[Callable[[], Any]]:
    """A call for each candidate that compiles it. The small problem compiles the large one's kernel."""
    rows = table(torch.device("cpu"), arch)
    return [lambda row=row, tile=tile: make_step(row, tile, row.checked)() for row in rows for tile in row.candidates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    minutes = "stop after this long (default 25)"
    parser.add_argument("--minutes", type=positive_number, default=25.0, metavar="N", help=minutes)
    parser.add_argument("--capability", type=int, help=argparse.SUPPRESS)  # of a process that compiles
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.slice:
        return compile_slice(candidates_jobs(arguments.capability), *arguments.slice, arguments.capability)
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    device, deadline = torch.device("cuda"), time.monotonic() + 60 * arguments.minutes
    arch = int("{}{}".format(*torch.cuda.get_device_capability()))
    command = [sys.executable, __file__, "--capability", str(arch)]
    over_cores(command, 20 * arguments.minutes)  # a third of the time, in seconds
    for row in table(device, arch):
        search(row, device, deadline)
        torch.cuda.synchronize()  # raises where a candidate has left the device unusable


if __name__ == "__main__":
    main()
