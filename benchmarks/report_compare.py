"""Two records side by side: what got slower, or faster, by more than the quartiles of both."""

from __future__ import annotations

from pathlib import Path

import records


def verdict(before: records.Row, after: records.Row) -> str:
    """Of two timings of one thing: "slower", "faster", or "" where their quartiles overlap."""
    if after["q1_ms"] > before["q3_ms"]:
        return "slower"
    return "faster" if after["q3_ms"] < before["q1_ms"] else ""


def main(a: Path, b: Path) -> int:
    """Prints the comparison. Returns 1 when something of fastattn got slower, or no longer works, in b, else 0."""
    before, after = records.load(a), records.load(b)
    print(f"A: {a}: {records.machine(before)}\nB: {b}: {records.machine(after)}")
    if records.machine(before) != records.machine(after):
        print("Not the same machine or versions: differences are not the code's alone.")
    earlier = {(row["op"], row["case"], row["provider"]): row for row in before["rows"]}
    worse, shared = 0, 0
    for row in after["rows"]:
        old = earlier.get((row["op"], row["case"], row["provider"]))
        if old is None:
            continue
        shared += 1
        name = f"{row['op']} {row['case']}: {row['provider']}"
        if old["status"] != row["status"]:
            print(f"{name}: {old['status']} -> {row['status']} {row.get('reason', '')}".rstrip())
            worse += row["ours"] and old["status"] == "ok"
        if old["status"] != "ok" or row["status"] != "ok":
            continue
        if not row["timings"]:
            found = "more" * (row["peak_mib"] > 1.02 * old["peak_mib"])  # a tensor more; two runs need not be equal
            print(f"{name}, memory: {old['peak_mib']:.1f} -> {row['peak_mib']:.1f} MiB {found}".rstrip())
            worse += row["ours"] and bool(found)
        for direction, timed in row["timings"].items():
            then = old["timings"][direction]
            found = verdict(then, timed)
            ratio = timed["median_ms"] / then["median_ms"]
            print(f"{name}, {direction}: {then['median_ms']:.4g} -> {timed['median_ms']:.4g} ms, {ratio:.2f}x {found}")
            worse += row["ours"] and found == "slower"
    print(f"{shared} measurements in both; of fastattn, {worse} got slower beyond the quartiles or larger, or broke")
    return int(worse > 0)
