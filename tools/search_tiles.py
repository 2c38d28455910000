"""Searches the tile tables of the Triton kernels on the GPU of this machine, and prints the tiles to write there.

    python tools/search_tiles.py [--only attention ...] [--minutes N]
    TRITON_INTERPRET=1 python tools/search_tiles.py --quick --device cpu        a rehearsal

Every candidate first solves a small problem and is compared with float64, as in the doctor. A candidate that is wrong,
or does not compile or launch, is rejected with its reason. The others are timed on a large problem, as in the
benchmarks, in samples that alternate with those of the tile in the table. A row changes only where the
new tile is faster by 3 %. The candidates are compiled first, in one process for each core, into Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
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
from fastattn.check.doctor import check, positive_number, usable_device

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import timing  # noqa: E402

GAIN = 1.03  # how many times as fast a new tile must be
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


def attention(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """The table of kernels/attention/tile_sizes.py, on problems as in training."""
    config = importlib.import_module("fastattn.kernels.attention.tile_sizes")  # the package has a function of that name
    head_dims, dtypes = ((64,), (torch.float32,)) if quick else ((64, 128, 256), (torch.bfloat16, torch.float32))
    for dtype, head_dim, kernel in itertools.product(dtypes, head_dims, ("forward", "dq", "dkv", "dbias")):
        # Exact float32 has no tensor cores and needs small tiles. 16-bit matrix products need 64 rows or columns.
        sizes, stages = ((16, 32, 64), (1, 2)) if dtype == torch.float32 else ((32, 64, 128), (2, 3, 4))
        grid = [tile for tile in itertools.product(sizes, sizes, (4, 8), stages) if max(tile[:2]) > sizes[0]]

        def problem(batch: int, heads: int, length: int, head_dim: int = head_dim, kernel: str = kernel) -> Problem:
            bias = (1, heads, length, length) if kernel == "dbias" else None
            shape = {"B": batch, "H": heads, "Lq": length, "Lk": length, "D": head_dim}
            return cases.attention(**shape, bias=bias, is_causal=True, device=device)

        def use(tile: Tile, kernel: str = kernel) -> AbstractContextManager:
            look_up = config._look_up
            chosen = lambda name, *rest: tile if name == kernel else look_up(name, *rest)  # noqa: E731
            return mock.patch.multiple(config, INTERPRETED=False, _look_up=chosen)

        length = 1024 if dtype == torch.float32 or kernel == "dbias" else 4096
        yield Row(
            f"attention {kernel}, {dtype}, D {head_dim}".replace("torch.", ""),
            dtype,
            checked=partial(problem, 1, 2, 48) if quick else partial(problem, 2, 2, 336),
            timed=partial(problem, 1, 2, 48) if quick else partial(problem, 4, 8, length),
            direction="forward" if kernel == "forward" else "backward",
            current=config._look_up(kernel, arch, dtype, head_dim, False),
            candidates=[config.Config(*tile) for tile in ([(32, 32, 4, 1), (64, 32, 4, 1)] if quick else grid)],
            use=use,
        )


def feed_forward(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """tile_for() of kernels/feed_forward/matmul.py. relu is wide in both directions, swiglu in none, so forward and
    backward are timed together."""
    from fastattn.kernels.feed_forward import backward, forward, matmul

    d, d_ff = (32, 32) if quick else (512, 2048)
    for activation, few in [("relu", False)] if quick else itertools.product(("relu", "swiglu"), (False, True)):
        dtype, tokens = torch.float32 if quick else torch.bfloat16, 20 if quick else 160 if few else 8192
        grid = itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4, 5))

        def problem(tokens: int, activation: str = activation) -> Problem:
            return cases.feed_forward(activation, tokens=(tokens,), d=d, d_ff=d_ff, d_out=d, device=device)

        yield Row(
            f"feed-forward, {activation}, {'few' if few else 'many'} tokens",
            dtype,
            checked=partial(problem, min(tokens, 400)),
            timed=partial(problem, tokens),
            direction="both",
            current=matmul.tile_for(dtype, arch, tokens, activation == "relu"),
            candidates=[matmul.Tile(*tile) for tile in ([(16, 32, 16, 4, 1), (32, 32, 16, 4, 1)] if quick else grid)],
            use=partial(_replaced, "tile_for", (forward, backward)),
        )


def add_layer_norm(device: torch.device, arch: int, quick: bool) -> Iterator[Row]:
    """forward_tile() and backward_tile() of kernels/add_layer_norm: rows a program and warps, at each width."""
    from fastattn.kernels.add_layer_norm import backward, forward

    for hidden, direction in itertools.product((64,) if quick else (512, 1024, 4096), ("forward", "backward")):
        module, name = (forward if direction == "forward" else backward), f"{direction}_tile"
        grid = [
            (rows, hidden, warps, *stages)
            for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
            for stages in ([()] if direction == "forward" else [(1,), (2,), (3,)])
            if 8 <= rows * hidden / (32 * warps) <= 64  # values of a lane
        ]

        def problem(rows: int, hidden: int = hidden) -> Problem:
            return cases.add_layer_norm(rows=(rows,), hidden=hidden, dropout_p=0.1, device=device)

        yield Row(
            f"layer norm {direction}, hidden {hidden}",
            torch.bfloat16,
            checked=partial(problem, 10 if quick else 300),
            timed=partial(problem, 10 if quick else 32768 if hidden <= 1024 else 8192),
            direction=direction,
            current=getattr(module, name)(hidden),
            candidates=grid[:2] if quick else grid,
            use=partial(_replaced, name, (module,)),
        )


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


@contextlib.contextmanager
def _replaced(name: str, modules: Sequence[Any], tile: Tile) -> Iterator[None]:
    """The function `name` of these modules returns the tile."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: tile))
        yield


TABLES = {"attention": attention, "feed_forward": feed_forward, "add_layer_norm": add_layer_norm}


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


def try_tile(row: Row, tile: Tile, device: torch.device) -> dict[str, Any]:
    """Check a candidate and time it: {"tile", "status": "ok", "wrong" or "failed", "reason" or "ms" and "table_ms"}."""
    result: dict[str, Any] = {"tile": tuple(tile)}
    try:
        with using(row, tile):
            bad = [record for record in check(row.checked(), row.dtype, ["triton"]) if not record["ok"]]
        if bad and "failed" in bad[0]:
            return result | {"status": "failed", "reason": bad[0]["failed"].splitlines()[0][:200]}
        if bad:
            return result | {"status": "wrong", "reason": ", ".join(record["result"] for record in bad)}
        calls = [make_step(row, used, row.timed) for used in (tile, row.current)]
        new, table = timing.measure_in_turn(calls, device, budget_s=0.2)
        return result | {"status": "ok", "ms": new.median_ms, "table_ms": table.median_ms}
    except Exception as error:  # a tile that cannot be compiled or launched at the large size
        return result | {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def search(row: Row, device: torch.device, deadline: float) -> tuple[Tile, list[dict[str, Any]]]:
    """The tile to use, and the results of all candidates that there is time for."""
    tried = []
    for tile in row.candidates:
        if time.monotonic() > deadline:
            break
        if tuple(tile) != tuple(row.current):
            tried.append(try_tile(row, tile, device))
    faster = [result for result in tried if result["status"] == "ok" and result["table_ms"] >= GAIN * result["ms"]]
    best = min(faster, key=lambda result: result["ms"] / result["table_ms"], default={"tile": tuple(row.current)})
    return best["tile"], tried


def render(row: Row, chosen: Tile, tried: list[dict[str, Any]]) -> str:
    """The measurements of a row, and the tile to write into the table."""
    lines = [f"\n{row.name}, in the table: {tuple(row.current)}"]
    for result in tried:
        said = f"{result['status']}: {result['tile']}"
        if result["status"] == "ok":
            said += f"  {result['table_ms'] / result['ms']:.3f} x the speed  {result['ms']:.4f} ms"
        lines.append(f"  {said}{': ' + result['reason'] if 'reason' in result else ''}")
    return "\n".join([*lines, f"  {'unchanged' if chosen == tuple(row.current) else 'NEW'}: {chosen}"])


def candidates_jobs(only: Sequence[str], arch: int) -> list[Callable[[], Any]]:
    """A call for each candidate of these tables that compiles it. The small problem compiles the large one's kernel."""
    rows = [row for name in only for row in TABLES[name](torch.device("cpu"), arch, False)]
    return [lambda row=row, tile=tile: make_step(row, tile, row.checked)() for row in rows for tile in row.candidates]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="OP", help=", ".join(TABLES))
    parser.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    minutes = "stop after this long (default 25)"
    parser.add_argument("--minutes", type=positive_number, default=25.0, metavar="N", help=minutes)
    parser.add_argument("--quick", action="store_true", help="tiny problems and two candidates, to see that it runs")
    parser.add_argument("--capability", type=int, help=argparse.SUPPRESS)  # of a process that compiles
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.slice:
        compile_slice(candidates_jobs(arguments.only, arguments.capability), *arguments.slice, arguments.capability)
        return 0
    device = arguments.device
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("on a CPU Triton only runs with TRITON_INTERPRET=1, and its times mean nothing: see --quick")
    deadline, arch = time.monotonic() + 60 * arguments.minutes, 0
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded there
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
        command = [sys.executable, __file__, "--only", *arguments.only, "--capability", str(arch)]
        over_cores(command, 20 * arguments.minutes)  # a third of the time, in seconds
    for row in (row for name in arguments.only for row in TABLES[name](device, arch, arguments.quick)):
        if time.monotonic() > deadline:
            print(f"\n{row.name}: not reached in {arguments.minutes} minutes")
            continue
        print(render(row, *search(row, device, deadline)), flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises where a candidate has left the device unusable
    return 0


if __name__ == "__main__":
    sys.exit(main())
