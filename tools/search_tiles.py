"""Searches the tile tables of the Triton kernels on the GPU of this machine, and prints the tiles to write there.

    python tools/search_tiles.py [--only attention ...] [--minutes N]

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
    """One row of a tile table. `checked` is a small problem with ragged tiles, `timed` a large one.

    Both have equal flags, head dimensions and widths. Their other sizes are multiples of 16 in both or in neither, so
    Triton compiles one kernel for both. direction: what is timed, "forward", "backward" or "both". use(tile): a context
    in which launches use this tile.
    """

    name: str
    dtype: torch.dtype
    checked: Callable[[], Problem]
    timed: Callable[[], Problem]
    direction: str
    current: Tile
    candidates: Sequence[Tile]
    use: Callable[[Tile], AbstractContextManager]


def attention(device: torch.device, arch: int) -> Iterator[Row]:
    """The table of kernels/attention/tile_sizes.py, on problems as in training."""
    config = importlib.import_module("fastattn.kernels.attention.tile_sizes")  # the package has a function of that name
    kernels = ("forward", "dq", "dkv", "dbias")
    for dtype, head_dim, kernel in itertools.product((BFLOAT16, FLOAT32), (64, 128, 256), kernels):
        # Exact float32 has no tensor cores and needs small tiles. 16-bit matrix products need 64 rows or columns.
        sizes, stages = ((16, 32, 64), (1, 2)) if dtype == FLOAT32 else ((32, 64, 128), (2, 3, 4))
        grid = itertools.product(sizes, sizes, (4, 8), stages)

        def problem(B: int, H: int, L: int, D: int = head_dim, has_bias: bool = kernel == "dbias") -> Problem:
            bias = (1, H, L, L) if has_bias else None
            return cases.attention(B=B, H=H, Lq=L, Lk=L, D=D, bias=bias, is_causal=True, device=device)

        def use(tile: Tile, kernel: str = kernel) -> AbstractContextManager:
            look_up = config._look_up
            chosen = lambda name, *rest: tile if name == kernel else look_up(name, *rest)  # noqa: E731
            return mock.patch.object(config, "_look_up", chosen)

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


def feed_forward(device: torch.device, arch: int) -> Iterator[Row]:
    """tile_for() of kernels/feed_forward/matmul.py. relu is wide in both directions, swiglu in none, so forward and
    backward are timed together."""
    from fastattn.kernels.feed_forward import backward, forward, matmul

    @contextlib.contextmanager
    def use(tile: Tile) -> Iterator[None]:
        tile_for = lambda *_, **__: tile  # noqa: E731
        with mock.patch.object(forward, "tile_for", tile_for), mock.patch.object(backward, "tile_for", tile_for):
            yield

    for activation, tokens in itertools.product(("relu", "swiglu"), (8192, 160)):
        grid = itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4, 5))
        problem = partial(cases.feed_forward, activation, d=512, d_ff=2048, d_out=512, device=device)
        yield Row(
            f"feed-forward, {activation}, {tokens} tokens",
            BFLOAT16,
            checked=partial(problem, tokens=(min(tokens, 400),)),
            timed=partial(problem, tokens=(tokens,)),
            direction="both",
            current=matmul.tile_for(BFLOAT16, arch, tokens, activation == "relu"),
            candidates=[*itertools.starmap(matmul.Tile, grid)],
            use=use,
        )


TABLES = {"attention": attention, "feed_forward": feed_forward}


@contextlib.contextmanager
def using(row: Row, tile: Tile) -> Iterator[None]:
    """Launches use this tile. Otherwise they remember the tile of a class of calls."""
    from fastattn.kernels.common import launch

    with row.use(tile):
        launch.forget()
        try:
            yield
        finally:
            launch.forget()


def make_step(row: Row, tile: Tile, problem: Callable[[], Problem]) -> Callable[[], Any]:
    """The call to time, with this tile."""
    given, saved = problem(), []
    leaves = {name: t.to(row.dtype).requires_grad_() for name, t in given.tensors.items()}

    def forward() -> torch.Tensor:
        with using(row, tile):
            return given.function(**leaves, **given.options, backend="triton")

    def backward() -> Any:
        out = saved[0] if saved and row.direction == "backward" else forward()
        saved[:] = saved or [out, torch.randn_like(out)]
        with using(row, tile):
            return torch.autograd.grad(out, list(leaves.values()), saved[1], retain_graph=True)

    return forward if row.direction == "forward" else backward


def try_tile(row: Row, tile: Tile, device: torch.device) -> tuple[float, str]:
    """How many times as fast as the table's tile a candidate is, 0 if it cannot be used; and the outcome in words."""
    try:
        with using(row, tile):
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


def candidates_jobs(only: Sequence[str], arch: int) -> list[Callable[[], Any]]:
    """A call for each candidate of these tables that compiles it. The small problem compiles the large one's kernel."""
    rows = [row for name in only for row in TABLES[name](torch.device("cpu"), arch)]
    return [lambda row=row, tile=tile: make_step(row, tile, row.checked)() for row in rows for tile in row.candidates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="OP", help=", ".join(TABLES))
    minutes = "stop after this long (default 25)"
    parser.add_argument("--minutes", type=positive_number, default=25.0, metavar="N", help=minutes)
    parser.add_argument("--capability", type=int, help=argparse.SUPPRESS)  # of a process that compiles
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.slice:
        return compile_slice(
            candidates_jobs(arguments.only, arguments.capability), *arguments.slice, arguments.capability
        )
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    device, deadline = torch.device("cuda"), time.monotonic() + 60 * arguments.minutes
    arch = int("{}{}".format(*torch.cuda.get_device_capability()))
    command = [sys.executable, __file__, "--only", *arguments.only, "--capability", str(arch)]
    over_cores(command, 20 * arguments.minutes)  # a third of the time, in seconds
    for row in (row for name in arguments.only for row in TABLES[name](device, arch)):
        search(row, device, deadline)
        torch.cuda.synchronize()  # raises where a candidate has left the device unusable


if __name__ == "__main__":
    main()
