"""Prepares much text: `python examples/prepare_text.py --data DIR --source de --target en --out PREPARED`.

It learns a byte-pair encoding from a sample of the training text, encodes all of it on all cores, leaves out what
cannot be trained on, and writes token ids that every process of a training maps into its memory. Then
`python examples/train_translation.py --data PREPARED` trains on them. Of small text the training command does all this
itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from command_line import exit_status, run_command
from translation.options import TextSettings, add_options
from translation.prepare import prepare
from translation.text import Text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status 2, with the reason on stderr, where the text or the folder cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of train*, val* and test* files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the prepared text")
    parser.add_argument("--skip-bad", action="store_true", help="leave out training lines that are no pair or no UTF-8")
    add_options(parser, TextSettings, None)
    options = vars(parser.parse_args(arguments))
    data, out, skip_bad = (options.pop(name) for name in ("data", "out", "skip_bad"))
    settings = TextSettings(**options)

    def command() -> None:
        prepare(Text(data, settings.source, settings.target, settings.lowercase, skip_bad), settings, out)

    return exit_status(command)


if __name__ == "__main__":
    run_command(main)
