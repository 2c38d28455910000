"""Prepares much text: `python examples/prepare_text.py --data DIR --source de --target en --out PREPARED`.

It learns a byte-pair encoding from a sample of the training text, encodes all of it, leaves out what cannot be trained
on, and writes token ids that every process of a training maps into its memory. Then
`python examples/train_translation.py --data PREPARED` trains on them. Of small text the training command does all this
itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from command_line import add_options, command, new_parser, run_command
from translation.prepare import prepare
from translation.settings import TextSettings
from translation.text import Text


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of train*, val* and test* files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the prepared text")
    parser.add_argument("--skip-bad", action="store_true", help="leave out training lines that are no pair or no UTF-8")
    add_options(parser, TextSettings)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    data, out, skip_bad = (vars(options).pop(name) for name in ("data", "out", "skip_bad"))
    settings = TextSettings(**TextSettings.defaults_with_data() | vars(options))
    prepare(Text(data, settings.source, settings.target, settings.lowercase, skip_bad), settings, out)


main = command(parse_arguments, run)

if __name__ == "__main__":
    run_command(main)
