"""Records, as JSON, and what is computed from them: rates, shares of the bound, ratios.

{"environment": {...}, "ceilings": {...} or None, "conditions": {...} or None (timing.py has both),
 "ops": {op: {"formula", "directions", "rates"}},
 "cases": [{"op", "case", "dtype", "work": {direction: {"flop", "byte", ...}}}], in the table's order,
 "rows": [{"op", "case", "provider", "ours", "status", "reason" or "timings" and so on}]}
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from cases import label

from fastattn.check.doctor import devices, versions

ROOT = Path(__file__).resolve().parents[1]
RECORD = "record.json"
SETUP = ("device", "versions", "sources", "threads", "table")  # a record has rows of one setup
PLAIN, SDPA = "plain PyTorch", "plain PyTorch with SDPA"  # providers of bench_transformer
WITH_PADDING = "default, padding kept"
LOSS_FROM_LOGITS = "default, own loss"
GRAPHS, GRAPHED_STEP = "default, graphs", "default, GraphedStep"
CUDA_GRAPHS = ", CUDA graphs"  # the end of a rival's name
UNTOUCHED = "as it is"  # a provider of bench_accelerate
FAILURES = ("wrong result", "failed", "crashed", "timed out")
Record = dict[str, Any]
Row = dict[str, Any]


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that a figure may depend on."""

    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=ROOT, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None  # no git, or not a checkout
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    index = device.index if device.index is not None else 0
    installed = versions()
    return {
        "device": devices()[index + 1 if device.type == "cuda" else 0],
        "versions": {key: value for key, value in installed.items() if key not in ("path", "extension")},
        "extension": installed["extension"]["built"],
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "sources": sources(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def sources() -> str:
    """A digest of all code that a figure may depend on: it names the version without git, too."""
    digest = hashlib.sha256()
    for folder in ("fastattn", "kernels", "csrc", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def described(plan: Sequence[tuple[Any, Any]]) -> Record:
    """The part of a record that depends only on the plan, a list of (benchmark, case): "ops" and "cases"."""
    ops, cases = {}, []
    for benchmark, case in plan:
        ops[benchmark.name] = {name: getattr(benchmark, name) for name in ("formula", "directions", "rates")}
        cases.append({"op": benchmark.name, "case": str(case), "dtype": label(case.dtype), "work": case.work})
    return {"ops": ops, "cases": cases}


def save(record: Record, path: Path) -> None:
    """The file is complete or not there. One row a line, numbers with six digits."""
    rounded = json.loads(json.dumps(record, allow_nan=False), parse_float=lambda digits: float(f"{float(digits):.6g}"))

    def lines(value: Any) -> str:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)

    scratch = path.with_suffix(".new")
    scratch.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {lines(rounded[key])}" for key in rounded) + "\n}\n")
    scratch.replace(path)


def load(path: Path) -> Record:
    """A record from its file or its folder."""
    return json.loads((path / RECORD if path.is_dir() else path).read_text())


def unfinished(folder: Path, environment: Record) -> Record | None:
    """The record that a run with this environment goes on with. One of another setup is renamed."""
    if not (folder / RECORD).exists():
        return None
    record = load(folder)
    if all(record["environment"].get(key) == environment[key] for key in SETUP):
        return record
    date = record["environment"]["date"][:19].replace(":", "")
    (folder / RECORD).replace(folder / f"record_{date}.json")
    return None


def row_key(row: Row) -> tuple[str, str, str]:
    return row["op"], row["case"], row["provider"]


def case_rows(record: Record, case: Row) -> list[Row]:
    return [row for row in record["rows"] if (row["op"], row["case"]) == (case["op"], case["case"])]


def median(row: Row | None, direction: str) -> float | None:
    """Milliseconds, or None where there is no such row or nothing was timed."""
    return row["timings"][direction]["median_ms"] if row and row["status"] == "ok" else None


def provider_row(rows: Sequence[Row], provider: str) -> Row | None:
    return next((row for row in rows if row["provider"] == provider), None)


def default_row(rows: Sequence[Row]) -> Row | None:
    """The row of fastattn's default."""
    return next((row for row in rows if row.get("default")), None)


def bound_ms(record: Record, case: Row, direction: str) -> float | None:
    """The least time that the work can take on this machine, by its ceilings; None where they were not measured, or the
    work is not that of the machine."""
    flop_per_s = (record["ceilings"] or {"flop_per_s": {}})["flop_per_s"].get(case["dtype"])
    work = case["work"].get(direction)
    if flop_per_s is None or work is None:
        return None
    return 1e3 * max(work["flop"] / flop_per_s, work["byte"] / record["ceilings"]["byte_per_s"])


def rate(amount: float, ms: float, unit: str) -> str:
    """12.3 TFLOP/s, 4.56 GB/s, 78900 tokens/s."""
    per_s = amount / ms * 1e3
    if unit == "token":
        return f"{per_s:.0f} tokens/s"
    scale, prefix = (1e12, "T") if per_s >= 1e12 else (1e9, "G")
    return f"{per_s / scale:.3g} {prefix}{'FLOP' if unit == 'flop' else 'B'}/s"


def is_on_gpu(record: Record) -> bool:
    return record["environment"]["device"]["device"] != "cpu"


def is_busy(record: Record) -> bool:
    """Others were at work before the first measurement."""
    return (record["environment"]["load_before"] or 0.0) > 0.5


def machine(record: Record) -> str:
    """One line: the device, and the versions."""
    environment, device = record["environment"], record["environment"]["device"]
    if not is_on_gpu(record):
        products = " with oneDNN's products" if device.get("float32_products") == "oneDNN" else ""
        threads = f"{environment['threads']} thread{'s' * (environment['threads'] != 1)}"
        device = f"{device['name']} (CPU{products}), {threads}"
    else:
        device = f"{device['name']}, {device['memory_gib']} GiB"
    given = environment["versions"]
    parts = [f"{name} {given[name]}" for name in ("torch", "triton", "cuda", "driver") if given[name]]
    return f"{device}; {', '.join(parts)}"


def slowdown(rows: Sequence[Row], row: Row | None, direction: str) -> float | None:
    """A provider's time, divided by that of fastattn's default: by alternating samples, else by the medians."""
    ms, default_ms = median(row, direction), median(default_row(rows), direction)
    if ms is None or default_ms is None:
        return None
    return row.get("speed", {}).get(direction, ms / default_ms)


def fastest_other(rows: Sequence[Row], direction: str) -> tuple[float, str] | None:
    """The fastest rival's time divided by that of fastattn's default, and the rival's name."""
    found = [(slowdown(rows, row, direction), row["provider"]) for row in rows if not row["ours"]]
    return min(((ratio, name) for ratio, name in found if ratio), default=None)
