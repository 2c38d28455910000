"""Searches the tile tables on the device at hand and prints the rows to paste beside the launches.

    python benchmarks/tune.py [--only attention ...] [--minutes N] [--out FILE.json]
    TRITON_INTERPRET=1 python benchmarks/tune.py --quick --device cpu        a rehearsal

Every candidate first solves a small problem and is judged against float64, as in the tests; one that is wrong, or does
not compile or launch, is rejected and said. The others are timed on a large problem, the tile in the table first and
last; a row changes only when the new tile's slower quartile beats the old one's faster quartile. On a GPU the
candidates are compiled beforehand, in a process a core: they share Triton's cache. tune_tables.py names the tables.

Tiles of the CUDA kernels are template parameters: they are not searched, as a change is a compile away. In the CUDA
rooms the search is for which of their kernels a call takes, where more than one can serve it: tune_cuda.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timing  # before torch: it sets what torch reads when imported
import torch
import tune_cuda
from precompile import every, over_cores
from tune_tables import BACKENDS as TRITON_BACKENDS
from tune_tables import Row, call

from fastattn.doctor import check, devices, usable_device, versions

BACKENDS = TRITON_BACKENDS | {"cuda_attention": tune_cuda.attention, "cuda_feed_forward": tune_cuda.feed_forward}
BUDGET_S = 0.2  # of a candidate's samples


class DeviceLost(Exception):
    """A candidate has left the device unusable; the message says which."""


def try_tile(row: Row, tile: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Check and time one candidate: {"tile", "status": "ok", "wrong" or "failed", "reason" or figures}."""
    result: dict[str, Any] = {"tile": list(tile)}
    try:
        with row.use(tile):
            records = list(check(row.checked(), row.dtype, [row.backend]))
            bad = [record for record in records if not record["ok"]]
            if bad and "failed" in bad[0]:
                return result | {"status": "failed", "reason": bad[0]["failed"].splitlines()[0][:200]}
            if bad:
                outside = ", ".join(record["result"] for record in bad)
                return result | {"status": "wrong", "reason": f"out of bounds: {outside}"}
            measured = timing.measure(call(row), device, BUDGET_S)
    except Exception as error:  # a tile that cannot be compiled or launched at the large size
        return result | {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                raise DeviceLost(f"{row.name}, tile {tile}: {error}") from error
    return result | {"status": "ok"} | measured._asdict()


def search(row: Row, device: torch.device, deadline: float) -> dict[str, Any]:
    """All candidates of a row, the one in the table first and again last; what to take, and whether it is new."""
    tried = [try_tile(row, row.current, device)]
    for tile in row.candidates:
        if time.monotonic() > deadline:
            break
        if tuple(tile) != tuple(row.current):
            tried.append(try_tile(row, tile, device))
    again = try_tile(row, row.current, device)  # clocks may have moved meanwhile: the faster of the two counts
    if again["status"] == "ok" and again["q1_ms"] < tried[0].get("q1_ms", float("inf")):
        tried[0] = again
    good = [result for result in tried if result["status"] == "ok"]
    best = min(good, key=lambda result: result["median_ms"], default=None)
    before = tried[0]
    better = best is not None and (before["status"] != "ok" or best["q3_ms"] < before["q1_ms"])
    chosen = tuple(best["tile"]) if better else tuple(row.current)
    return {
        "row": row.name,
        "before": before,
        "chosen": list(chosen),
        "changed": better,
        "paste": row.paste(chosen),
        "left_out": len([tile for tile in row.candidates if list(tile) not in [result["tile"] for result in tried]]),
        "tried": sorted(tried, key=lambda result: result.get("median_ms", float("inf"))),
    }


def render(found: dict[str, Any]) -> str:
    """The outcome of a row for people: the line to paste, and the measurements behind it."""
    tried = found["tried"]
    good = [result for result in tried if result["status"] == "ok"]
    lines = [
        f"\n{found['row']}: {len(good)} of {len(tried)} candidates are right"
        + f", {found['left_out']} not tried for want of time" * bool(found["left_out"])
    ]
    before, chosen = found["before"], next((r for r in good if r["tile"] == found["chosen"]), None)
    for result in good[:5] + [before] * (before["status"] == "ok" and before not in good[:5]):
        note = "  in the table" * (result["tile"] == before["tile"])
        quartiles = f"{result['q1_ms']:.4f} to {result['q3_ms']:.4f}"
        lines.append(f"  {result['median_ms']:9.4f} ms  ({quartiles})  {tuple(result['tile'])}{note}")
    lines += [f"  {r['status']}: {tuple(r['tile'])}: {r['reason']}" for r in tried if r["status"] != "ok"]
    if chosen is None:
        lines.append("  nothing to paste: no candidate is right")
    elif found["changed"] and before["status"] == "ok":
        gain = f"{before['median_ms'] / chosen['median_ms']:.3f} x"
        lines.append(f"  NEW, {gain} the speed of {tuple(before['tile'])}:\n{found['paste']}")
    else:
        lines.append(f"  {'NEW' if found['changed'] else 'stays'}:\n{found['paste']}")
    return "\n".join(lines)


def candidates_jobs(only: Sequence[str], arch: int) -> list[Callable[[], Any]]:
    """A call for each candidate of these tables that compiles it. The small problem compiles as the large one does."""

    def job(row: Row, tile: tuple[int, ...]) -> Callable[[], Any]:
        def compile_it() -> None:
            with row.use(tile):
                call(row._replace(timed=row.checked))()

        return compile_it

    rows = [row for name in only for row in BACKENDS[name](torch.device("cpu"), arch, False)]
    return [job(row, tile) for row in rows for tile in row.candidates]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--only", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="ROOM", help=", ".join(BACKENDS)
    )
    parser.add_argument("--device", type=usable_device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument("--minutes", type=float, default=25.0, metavar="N", help="stop after this long (default 25)")
    parser.add_argument("--quick", action="store_true", help="tiny problems and two candidates, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write every measurement here")
    parser.add_argument("--capability", type=int, help=argparse.SUPPRESS)  # both: of a process that compiles
    parser.add_argument("--slice", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.slice:
        every(candidates_jobs(arguments.only, arguments.capability), *arguments.slice, arguments.capability)
        return 0
    device = arguments.device
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("on a CPU Triton only runs with TRITON_INTERPRET=1, and its times mean nothing: see --quick")
    start, arch = time.monotonic(), 0
    deadline = start + 60 * arguments.minutes
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
        command = [sys.executable, __file__, "--only", *arguments.only, "--capability", str(arch)]
        over_cores(command, 20 * arguments.minutes)  # seconds: a third of the time at most
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    record: dict[str, Any] = {"versions": versions(), "devices": devices(), "device": str(device), "rows": []}
    lost = None
    for row in (row for name in arguments.only for row in BACKENDS[name](device, arch, arguments.quick)):
        if time.monotonic() > deadline:
            print(f"\n{row.name}: not reached in {arguments.minutes} minutes")
            continue
        try:
            record["rows"].append(search(row, device, deadline))
        except DeviceLost as error:
            lost = error
            break
        print(render(record["rows"][-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1))
    if lost:
        print(f"\nTHE DEVICE IS LOST, start again without this candidate: {lost}")
    right = [found for found in record["rows"] if any(result["status"] == "ok" for result in found["tried"])]
    return int(lost is not None or len(right) < len(record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
