"""What is fastest on this machine, if it was measured: a backend, or an algorithm of the backend aten.

`python -m fastattn tune` writes a record of a device: for each op and class of calls the backends that are right, the
fastest first, or for the backend aten the fastest algorithm. The choice of a backend, and aten, read it before they
use their built-in rules. Records are in the user's cache folder, one for each device. A user's record of another
version of fastattn or PyTorch, or of another number of threads on a CPU, is ignored: `Record.ignored` holds the reason,
and `explain` prints it. An unreadable record is ignored too, with a warning: a bad file never makes an op fail.
SHIPPED is a folder of the package with records of GPUs. They come after the user's, and hold for every GPU of the same
compute capability and every version of PyTorch.

{"format": 2, "device": name, "capability": [9, 0] or null, "threads": .., "versions": {"fastattn": .., "torch": ..},
 "date": .., "choices": {op: {class: [backend, ..]}, algorithm: {class: choice}}, "rows": the measurements}
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastattn

FORMAT = 2
SHIPPED = Path(__file__).parent / "records"


Choices = dict[str, dict[str, Any]]  # as in a record


class Record(NamedTuple):
    """choices: of the record that counts, {} if there is none. source: its path, or None. ignored: path -> reason."""

    choices: Choices
    source: Path | None
    ignored: dict[str, str]


def choice(op_name: str, device_type: str, call_class: Callable[[], str]) -> str | None:
    """What the record of a device, see `load_record`, names for such a call, or None.

    None in what torch.compile traces: there it would be a constant.
    """
    op_choices = choices(op_name, device_type)
    return op_choices.get(call_class()) if op_choices else None


def choices(op_name: str, device_type: str, index: int | None = None) -> dict[str, Any]:
    """What the record of a device names for each class of calls of an op, {} if nothing. As `choice`."""
    if torch.compiler.is_compiling():
        return {}
    return all_choices(device_type, index).get(op_name, {})


def all_choices(device_type: str, index: int | None = None) -> Choices:
    """What the record of a device names, by op. The same object until another record counts."""
    return _override if _override is not None else load_record(device_type, index).choices


_override: Choices | None = None


@contextmanager
def override_choices(choices: Choices) -> Iterator[None]:
    """In the whole process these choices hold instead of any record's: for measurements. {}: the built-in rules."""
    global _override
    before, _override = _override, choices
    try:
        yield
    finally:
        _override = before


def call_class(dtype: torch.dtype, dropout_p: float = 0.0, *traits: str) -> str:
    """The name of a class of calls, such as "float32, mask, dropout"."""
    return ", ".join((str(dtype).removeprefix("torch."), *traits, *(("dropout",) if dropout_p > 0 else ())))


def size_bucket(size: int, what: str, *limits: int) -> str:
    """A trait: "up to 128 keys", or "more keys" past the last of the limits."""
    return next((f"up to {limit} {what}" for limit in limits if size <= limit), f"more {what}")


def load_record(device_type: str, index: int | None = None) -> Record:
    """The record that counts for the CPU or a GPU. index: of the GPU, None for the current one. Records are read once
    in a process; see `reload_records`."""
    return _found(device_type, index, torch.get_num_threads() if device_type == "cpu" else None)


@functools.cache
def _found(device_type: str, index: int | None, threads: int | None) -> Record:
    if device_type not in ("cpu", "cuda"):
        return Record({}, None, {})
    ignored: dict[str, str] = {}
    name, capability = device_name(device_type, index), compute_capability(device_type, index)
    for path in _paths(name):
        record = _load(path)
        is_shipped = path.parent == SHIPPED
        if record is None or (is_shipped and not _is_for(record, capability)):
            continue
        if isinstance(record, str):  # the reason why it cannot be read
            ignored[str(path)] = record
        elif (reason := _ignored_reason(record, name, threads, is_shipped)) is not None:
            ignored[str(path)] = reason
        else:
            return Record(record["choices"], path, ignored)
    return Record({}, None, ignored)


def reload_records() -> None:
    """The next call reads the records again."""
    _found.cache_clear()
    _load.cache_clear()


def _paths(name: str) -> list[Path]:
    """Where records may be, in the order in which they count."""
    shipped = sorted(SHIPPED.glob("*.json"))
    try:
        return [user_path(name), *shipped]
    except RuntimeError:  # the user has no home folder, so no cache folder either
        return shipped


def user_path(name: str) -> Path:
    """The place of a device's record in the user's cache folder. RuntimeError if there is neither that nor a home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastattn" / (re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json")


def versions() -> dict[str, str]:
    """The versions for which a record holds."""
    return {"fastattn": fastattn.__version__, "torch": torch.__version__}


@functools.cache
def device_name(device_type: str, index: int | None = None) -> str:
    """The name of the processor or of a GPU. index: of the GPU, None for the current one."""
    return torch.cuda.get_device_name(index) if device_type == "cuda" else _cpu_name()


@functools.cache
def compute_capability(device_type: str, index: int | None = None) -> list[int] | None:
    """Of a GPU; None of a CPU."""
    return list(torch.cuda.get_device_capability(index)) if device_type == "cuda" else None


@functools.cache
def _load(path: Path) -> dict[str, Any] | str | None:
    """The record, or why it cannot be read, or None where there is none."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # no warning: there is hardly a record in a folder that cannot be read
        return f"cannot be read: {error.strerror}"
    except Exception as error:  # also RecursionError: a damaged file may be nested too deeply for json
        return _warned(path, f"cannot be read: {error}")
    choices = record.get("choices") if isinstance(record, dict) else None
    if not isinstance(choices, dict) or not all(isinstance(op_choices, dict) for op_choices in choices.values()):
        return _warned(path, 'is damaged: it has no "choices"')
    return record


def _warned(path: Path, reason: str) -> str:
    warnings.warn(f"fastattn ignores the record {path}: it {reason}", stacklevel=3)
    return reason


def _is_for(shipped: dict[str, Any] | str, capability: list[int] | None) -> bool:
    return capability is not None and isinstance(shipped, dict) and shipped.get("capability") == capability


def _ignored_reason(record: dict[str, Any], name: str, threads: int | None, is_shipped: bool) -> str | None:
    """Why a record that can be read does not count here. threads: of this process, None on a GPU."""
    if record.get("format") != FORMAT:
        return f"has format {record.get('format')}, expected {FORMAT}"
    if is_shipped:
        return None
    if record.get("device") != name:
        return f"was made on {record.get('device')}, this is {name}"
    if record.get("versions") != versions():
        return f"was made with {record.get('versions')}, this is {versions()}"
    if threads is not None and record.get("threads") != threads:
        return f"was made with threads: {record.get('threads')}, this process has {threads}"
    return None


def _cpu_name() -> str:
    # On Linux platform.processor() is often empty.
    return _cpu_info("model name") or platform.processor() or platform.machine()


def cpu_family() -> int:
    """The processor's family number, or 0 if it is unknown."""
    return int(_cpu_info("cpu family") or 0)


def _cpu_info(name: str) -> str:
    """Of the first processor, or "" if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or a closed /proc
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
