"""Which way of computing is fastest on this machine, where somebody has measured it.

`python -m fastattn tune` writes a record of a device: for each op and class of calls the fastest way that is right.
The dispatcher, and the backend `aten` for its own ways, ask here before they follow their built-in rules. Records lie
in the user's cache folder, one for each device, and in fastattn/records/, which ships with the package; the user's goes
first. One of another version of fastattn or PyTorch, or one that cannot be read, is ignored, and `reasons` says why.

{"format": 1, "device": name, "versions": {"fastattn": .., "torch": ..}, "date": .., "choices": {op: {class: way}},
 "rows": the measurements}
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastattn

FORMAT = 1
SHIPPED = Path(__file__).parent / "records"


class Found(NamedTuple):
    """choices: of the record that counts, {} if there is none. source: its path, or None. ignored: path -> reason."""

    choices: dict[str, dict[str, str]]
    source: Path | None
    ignored: dict[str, str]


def choice(op_name: str, device_type: str, call_class: Callable[[], str]) -> str | None:
    """The way that the record of the current device names for such a call, or None. Not in what torch.compile traces,
    where it would stay for good."""
    if torch.compiler.is_compiling():
        return None
    of_op = (_used[-1] if _used else found(device_type).choices).get(op_name)
    return None if of_op is None else of_op.get(call_class())


_used: list[dict[str, dict[str, str]]] = []


@contextmanager
def using(choices: dict[str, dict[str, str]]) -> Iterator[None]:
    """These choices hold instead of any record's, {} for the built-in rules: for measuring one way and the other."""
    _used.append(choices)
    try:
        yield
    finally:
        _used.pop()


def call_class(dtype: torch.dtype, dropout_p: float = 0.0, *traits: str) -> str:
    """The name of a class of calls, such as "float32, mask, dropout"."""
    return ", ".join((str(dtype).removeprefix("torch."), *traits, *(("dropout",) if dropout_p > 0 else ())))


def up_to(size: int, what: str, *limits: int) -> str:
    """A trait: "up to 128 keys", or "more keys" past the last of the limits."""
    return next((f"up to {limit} {what}" for limit in limits if size <= limit), f"more {what}")


@functools.cache
def found(device_type: str) -> Found:
    """What the records of the current device of this type say. They are read once in a process; see `forget`."""
    if device_type not in ("cpu", "cuda"):
        return Found({}, None, {})
    ignored = {}
    name = device_name(device_type)
    for path in (user_path(name), *sorted(SHIPPED.glob("*.json"))):
        if not path.exists():
            continue
        record = _load(path)
        reason = record if isinstance(record, str) else _why_ignored(record, name)
        if reason is None:
            return Found(record["choices"], path, ignored)
        ignored[str(path)] = reason
    return Found({}, None, ignored)


def forget() -> None:
    """The next call reads the records anew."""
    found.cache_clear()


def user_path(name: str) -> Path:
    """Where the record of a device lies in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastattn" / (re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json")


def versions() -> dict[str, str]:
    """What a record must agree with."""
    return {"fastattn": fastattn.__version__, "torch": torch.__version__}


@functools.cache
def device_name(device_type: str) -> str:
    """The current GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if device_type == "cuda" else _cpu_name()


def _load(path: Path) -> dict[str, Any] | str:
    """The record, or why it cannot be read."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    choices = record.get("choices") if isinstance(record, dict) else None
    if not isinstance(choices, dict) or not all(isinstance(of_op, dict) for of_op in choices.values()):
        return 'is damaged: it has no "choices"'
    return record


def _why_ignored(record: dict[str, Any], name: str) -> str | None:
    if record.get("format") != FORMAT:
        return f"has format {record.get('format')}, expected {FORMAT}"
    if record.get("device") != name:
        return f"was made on {record.get('device')}, this is {name}"
    if record.get("versions") != versions():
        return f"was made with {record.get('versions')}, this is {versions()}"
    return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux; platform.processor() is often empty there
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
