"""What the compilers make of every kernel, without a GPU: registers, spills, shared memory, occupancy, instruction mix,
and the bound that its FLOPs and bytes set. Compared with a committed record, so that worse machine code is seen where
no GPU is.

    python benchmarks/compiled_kernels.py            compile everything, print it
    python benchmarks/compiled_kernels.py --check    compare with benchmarks/results/compiled_kernels.json: 1 if worse
    python benchmarks/compiled_kernels.py --write    make that record

Made by the compilers that made the record, kernels must be equal to it: a difference that is meant is committed with a
new record, where it can be read. With other compilers only lost tensor cores, lost wide loads and kernels that do not
fit fail; fewer blocks a multiprocessor and spilled registers are told. The CUDA kernels need nvcc; where it is missing
they are left out, and that is said.

compiled_triton.py and compiled_cuda.py compile, compiled_launches.py asks the CUDA launchers for their shared memory,
compiled_sass.py reads machine code, compiled_work.py holds formulas.
Results are kept in build/compiled by what they were made of; processes that want the same wait for each other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import compiled_cuda
import compiled_launches
import compiled_triton
from compiled_sass import Kernel
from compiled_work import CEILINGS, work_of

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "compiled_kernels.json"
KEPT = ROOT / "build" / "compiled"
LANGUAGES = ("triton", "cuda")


@functools.cache
def triton_kernels() -> list[Kernel]:
    """Every Triton kernel of every case of compiled_triton.py."""
    # A Triton room imports from the package its masks alone: tests/test_architecture.py.
    sources = [*sorted((ROOT / "kernels").rglob("*.py")), *sorted((ROOT / "fastattn").glob("*mask*.py"))]
    made_by = [ROOT / "benchmarks" / f"compiled_{name}.py" for name in ("triton", "sass")]
    return _kept("triton", [*sources, *made_by], compiled_triton.versions(), compiled_triton.kernels)


@functools.cache
def cuda_extension() -> Path:
    """fastattn._C for both architectures. Where compiled_cuda.why_not() is None."""
    tag = f"cuda-{compiled_cuda.versions()['nvcc']}-python{sys.version_info[0]}.{sys.version_info[1]}"
    with _locked(tag):
        return compiled_cuda.extension(KEPT / tag)


@functools.cache
def cuda_kernels() -> list[Kernel]:
    """Every CUDA kernel. Where compiled_cuda.why_not() is None."""
    library = cuda_extension()
    made_by = [ROOT / "benchmarks" / f"compiled_{name}.py" for name in ("cuda", "sass", "launches")]
    made_by += sorted((ROOT / "fastattn" / "cuda").glob("*.py"))  # they choose among the kernels
    return _kept("cuda", [library, *made_by], {}, lambda: compiled_cuda.kernels(library, compiled_launches.launches()))


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kept(
    kind: str, sources: Sequence[Path], versions: dict[str, str], make: Callable[[], list[Kernel]]
) -> list[Kernel]:
    """make(), kept in a file named by the contents of these sources and the compilers' versions."""
    digest = hashlib.sha256(repr(versions).encode())
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    name = f"{kind}-{digest.hexdigest()[:16]}"
    file = KEPT / f"{name}.json"
    with _locked(name):
        if not file.exists():
            made = json.dumps([asdict(kernel) for kernel in make()])
            file.with_suffix(".partial").write_text(made)
            file.with_suffix(".partial").rename(file)
    return [Kernel(**fields) for fields in json.loads(file.read_text())]


def entries(kernels: Sequence[Kernel]) -> dict[str, dict[str, Any]]:
    """The part of a record that these kernels make: name -> figures."""
    found: dict[str, dict[str, Any]] = {}
    repeated: Counter[str] = Counter()
    for kernel in kernels:
        name = f"{kernel.language} {kernel.arch} {kernel.name} [{kernel.case}]"
        repeated[name] += 1  # a kernel that is launched in two forms in one case
        name += f" {repeated[name]}" if repeated[name] > 1 else ""
        fields = asdict(kernel)
        for told in ("language", "arch", "name", "case", *(("launched",) if kernel.launched else ())):
            del fields[told]
        instructions = fields.pop("instructions")
        work = work_of(kernel.language, kernel.name, kernel.case)
        bound = dict(zip(("bound", "bound_us"), work.bound(kernel.arch), strict=True)) if work else {}
        if work:
            bound["bound_us"] = float(f"{bound['bound_us']:.3g}")
            bound |= {"flop": round(work.flop), "byte": round(work.byte), "special": round(work.special)}
        found[name] = fields | {"blocks": kernel.blocks, "instructions": instructions} | bound
    return found


def current(languages: Sequence[str]) -> dict[str, Any]:
    """A record of what these languages compile to now; nothing of CUDA where it cannot be compiled."""
    record: dict[str, Any] = {"versions": {}, "kernels": {}}
    if "triton" in languages:
        record["versions"]["triton"] = compiled_triton.versions()
        record["kernels"] |= entries(triton_kernels())
    if "cuda" in languages and compiled_cuda.why_not() is None:
        record["versions"]["cuda"] = compiled_cuda.versions()
        record["kernels"] |= entries(cuda_kernels())
    return record


def kernel_of(name: str, entry: dict[str, Any]) -> Kernel:
    """The kernel of an entry."""
    language, arch, rest = name.split(" ", 2)
    fields = {key: value for key, value in entry.items() if key in Kernel.__dataclass_fields__}
    return Kernel(
        language=language, arch=arch, name=rest.split(" [")[0], case=rest.split("[", 1)[1].split("]")[0], **fields
    )


def lost(old: Kernel, new: Kernel) -> list[str]:
    """What new has lost, whatever compiled it."""
    found = []
    if new.blocks == 0 < old.blocks:
        found.append("it does not fit a multiprocessor any more")
    if old.tensor > 0 and new.tensor == 0:
        found.append("tensor cores are lost")
    elif new.tensor_core_dots < new.dots and old.tensor_core_dots == old.dots:
        found.append(f"{new.dots - new.tensor_core_dots} of {new.dots} products lost their tensor cores")
    if old.count("HGMMA") > 0 and new.count("HMMA") > old.count("HMMA"):
        found.append("a product fell from wgmma to mma.sync")
    if new.wide_loads < old.wide_loads / 2:
        found.append(f"{old.wide_loads} -> {new.wide_loads} loads of 16 bytes a thread")
    return found


def worse(old: Kernel, new: Kernel) -> list[str]:
    """In which respects new is slower code than old; another compiler's registers are not in our hands."""
    found = []
    if new.blocks < old.blocks:
        found.append(f"{old.blocks} -> {new.blocks} blocks a multiprocessor")
    if new.spills > 2 * old.spills + 8:
        found.append(f"{old.spills} -> {new.spills} loads and stores of spilled registers")
    if new.serialized and not old.serialized:
        found.append("wgmma is serialized")
    return found


def compare(record: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """A line for every kernel that is not as it must be, and one for every other that another compiler made worse.

    Only languages that both hold are compared.
    """
    failures, notes = [], []
    for language in LANGUAGES:
        if language not in now["versions"] or language not in record["versions"]:
            continue
        exact = record["versions"][language] == now["versions"][language]
        old, new = (
            {name: entry for name, entry in side["kernels"].items() if name.startswith(f"{language} ")}
            for side in (record, now)
        )
        failures += [f"{name}: is in the record, but is not compiled any more" for name in old if name not in new]
        failures += [f"{name}: is not in the record" for name in new if name not in old]
        for name in old.keys() & new.keys():
            kernels = kernel_of(name, old[name]), kernel_of(name, new[name])
            losses, reasons = lost(*kernels), lost(*kernels) + worse(*kernels)
            line = f"{name}: {_difference(old[name], new[name])}{'  WORSE: ' * bool(reasons)}{'; '.join(reasons)}"
            if losses or (exact and old[name] != new[name]):
                failures.append(line)
            elif reasons:
                notes.append(line)
    return sorted(failures), sorted(notes)


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """ "registers 128 -> 136, LDL 0 -> 12"."""
    flat = [{**{k: v for k, v in side.items() if k != "instructions"}, **side["instructions"]} for side in (old, new)]
    names = list(dict.fromkeys([*flat[0], *flat[1]]))
    changed = [(name, flat[0].get(name, 0), flat[1].get(name, 0)) for name in names]
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in changed if before != after)


def to_text(record: dict[str, Any]) -> str:
    """JSON with one kernel a line, so that a commit shows which changed."""
    kernels = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in record["kernels"].items())
    return f'{{\n "versions": {json.dumps(record["versions"])},\n "kernels": {{\n{kernels}\n }}\n}}\n'


def write(now: dict[str, Any]) -> None:
    """The record, with what it held of a language that was not compiled now."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": {}, "kernels": {}}
    record: dict[str, Any] = {"versions": {}, "kernels": {}}
    for language in LANGUAGES:
        source = now if language in now["versions"] else before
        if language in source["versions"]:
            record["versions"][language] = source["versions"][language]
        record["kernels"] |= {name: e for name, e in source["kernels"].items() if name.startswith(f"{language} ")}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(to_text(record))


def render(record: dict[str, Any]) -> str:
    """A record for people."""
    lines = [f"{language}: {versions}" for language, versions in record["versions"].items()]
    lines += [f"bounds of {arch} by the datasheet of {ceiling.device}" for arch, ceiling in CEILINGS.items()]
    for name, entry in record["kernels"].items():
        kernel = kernel_of(name, entry)
        lines += [
            f"\n{name}",
            f"  registers {kernel.registers}  spills {kernel.spills}  shared {kernel.shared / 1024:.1f} KiB  "
            f"{kernel.blocks} x {kernel.warps} warps a multiprocessor{'  WGMMA IS SERIALIZED' * kernel.serialized}",
            "  " + "  ".join(f"{instruction} {count}" for instruction, count in kernel.instructions.items()),
            "  no formula"
            if "bound" not in entry
            else f"  at least {entry['bound_us']} us, by {entry['bound']}: {entry['flop'] / 1e9:.4g} GFLOP, "
            f"{entry['byte'] / 1e6:.4g} MB, {entry['special'] / 1e9:.3g} G exponentials and reciprocals",
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with the record; exit 1 if anything is worse")
    action.add_argument("--write", action="store_true", help="write the record")
    parser.add_argument("--only", choices=LANGUAGES, help="one language")
    arguments = parser.parse_args(argv)
    languages = [arguments.only] if arguments.only else LANGUAGES
    if "cuda" in languages and (reason := compiled_cuda.why_not()):
        print(f"CUDA kernels are left out: {reason}", file=sys.stderr)
    now = current(languages)
    if arguments.check:
        record = json.loads(RECORD.read_text())
        failures, notes = compare(record, now)
        made_by = "the compilers of the record" if record["versions"] == now["versions"] else f"{now['versions']}"
        print("\n".join(failures) or f"{len(now['kernels'])} kernels, by {made_by}: nothing is lost")
        if notes:
            print("\nWorse by these compilers than by those of the record:", *notes, sep="\n")
        if failures:
            print("\nIf this is meant: python benchmarks/compiled_kernels.py --write, and commit the record.")
        return int(bool(failures))
    if arguments.write:
        write(now)
        print(f"{len(now['kernels'])} kernels written to {RECORD}")
        return 0
    print(render(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
