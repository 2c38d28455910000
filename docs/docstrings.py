"""How mkdocstrings shows a docstring: its lines "argument: what it is" become a list. An extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Arguments(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            parameters = getattr(obj, "parameters", ())
            obj.docstring.value = as_list(obj.docstring.value, {parameter.name for parameter in parameters})


def as_list(docstring: str, names: set[str]) -> str:
    """A line that begins with one of the names, and has a colon, begins an item; indented lines go on with it."""
    lines: list[str] = []
    is_item = False
    for line in docstring.splitlines():
        # Such as "query (B, H, Lq, Dk), key (B, Hk, Lk, Dk): float32 ..".
        found = re.match(r"(\w+)([^:.]*): +(.*)", line)
        if found and found[1] in names:
            lines += [*([] if is_item else [""]), f"- **{found[1]}{found[2]}**: {found[3]}"]
            is_item = True
        else:
            goes_on = is_item and line.startswith(" ")
            lines += [line] if goes_on or not is_item or not line else ["", line]
            is_item = goes_on
    return "\n".join(lines).replace("[", r"\[")
