"""Options of the commands as fields of frozen dataclasses, and those that decide what the text becomes."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from command_line import at_least, positive, real_number


def option(
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    with_data: Any = None,
    *,
    choices: Sequence[str] | None = None,
    may_change: bool = False,
) -> Any:
    """A field of Settings and an option of the command.

    with_data: the default with --data, if that differs. may_change: a resumed run may use another value, because the
    earlier steps do not depend on it.
    """
    with_data = default if with_data is None else with_data
    metadata = dict(help=help, type=type, default=default, with_data=with_data, choices=choices, may_change=may_change)
    return dataclasses.field(metadata=metadata)


def share(text: str) -> float:
    value = real_number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {value}")
    return value


def rate_scale(text: str) -> float:
    value = real_number(text)
    if not 0 < value <= 100:  # above, no model learns
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, got {value}")
    return value


def ratio(text: str) -> float:
    value = real_number(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@dataclass(frozen=True)
class TextSettings:
    """The options that decide what the text becomes."""

    source: str = option("language to translate from", default="de")
    target: str = option("language to translate to", default="en")
    vocabulary: int = option("size of the joint BPE", positive, 10000)
    max_length: int = option("longest sentence, in tokens, its end included", at_least(2), 64, 200)
    max_ratio: float = option("leave out pairs with a side this many times as long as the other, in tokens", ratio, 9.0)
    keep_duplicates: bool = option("keep pairs that occur several times", bool, False)
    lowercase: bool = option("read text in lower case, and score it so", bool, False)

    @classmethod
    def checked(cls, options: dict[str, Any]) -> Any:
        """Options that come from a file. What an earlier version did not have gets its default. TypeError or ValueError
        where there is another, or a value that cannot be given."""
        settings = cls(**{field.name: field.metadata["default"] for field in dataclasses.fields(cls)} | options)
        for field in dataclasses.fields(cls):
            value, kind = getattr(settings, field.name), field.metadata["type"]
            try:
                valid = isinstance(value, bool) if kind is bool else kind(str(value)) == value
            except argparse.ArgumentTypeError:
                valid = False
            valid = valid or value is field.metadata["default"] is None
            if not valid:
                raise ValueError(f"{field.name}={value!r}")
        return settings


def flag(name: str) -> str:
    """ "d_model" -> "--d-model"."""
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, settings: type, with_data: bool | None) -> None:
    """An option for each field. with_data: whose defaults; with None it is with data, and help has no other."""
    for field in dataclasses.fields(settings):
        meta = field.metadata
        default = meta["default" if with_data is False else "with_data"]
        if meta["type"] is bool:
            parser.add_argument(flag(field.name), action="store_true", help=meta["help"])
            continue
        note = "" if default is None else f" (default {default})"
        if with_data is not None and meta["with_data"] != meta["default"]:
            note = f" (default {meta['default']} for dates, {meta['with_data']} with --data)"
        options = {"type": meta["type"], "choices": meta["choices"], "default": default}
        parser.add_argument(flag(field.name), help=meta["help"] + note, **options)
