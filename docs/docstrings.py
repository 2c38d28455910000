"""How mkdocstrings shows docstrings and classes. An extension of griffe.

Lines "argument: what it is" become a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

HEAD = re.compile(r"(\w+)((?:\([^)]*\)|[^:.(])*): +(.*)")  # "query (B, H, Lq, Dk), key (B, Hk, Lk, Dk): float32 .."
RESULTS = re.compile(r"(Returns|Raises|Source|TypeError|ValueError|RuntimeError)\b")


class Arguments(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fields = obj.members if obj.is_class else ()
            names = {*(parameter.name for parameter in getattr(obj, "parameters", ())), *fields}
            obj.docstring.value = as_list(obj.docstring.value, names)


def as_list(docstring: str, names: set[str]) -> str:
    """A line that begins with one of the names, and has a colon, begins an item; indented lines go on with it.

    Several arguments in one line are three spaces or more apart.
    """
    lines: list[str] = []
    is_item = is_code = False
    for line in [part for whole in docstring.splitlines() for part in _arguments(whole, names)]:
        is_code = line.startswith("    ") and not is_item and (is_code or not lines or not lines[-1])
        found = None if is_code else HEAD.match(line)
        if found and found[1] in names:
            lines += [*([] if is_item else [""]), f"- **{found[1]}{found[2]}**: {found[3]}"]
            is_item = True
            continue
        goes_on = is_item and line.startswith(" ")
        starts = bool(line) and not goes_on and (is_item or (not is_code and RESULTS.match(line) is not None))
        lines += ["", line] if starts else [line]
        is_item = goes_on
    return "\n".join(lines)


def _arguments(line: str, names: set[str]) -> list[str]:
    parts = re.split(r"(?<=\S) {3,}(?=\w)", line)
    if len(parts) > 1 and all((found := HEAD.match(part.strip())) and found[1] in names for part in parts[1:]):
        return parts
    return [line]
