"""`python -m fastattn NAME [OPTIONS]`: NAME is a module of fastattn.check that has `main(argv) -> exit status`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import fastattn

COMMANDS = {"doctor": "what is installed, which backend computes what, and how far each is from float64"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. The options after its name are the command's own."""
    parser = argparse.ArgumentParser(prog="python -m fastattn", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastattn {fastattn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="NAME", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(2)
    arguments, options = parser.parse_known_args(argv)
    try:
        return importlib.import_module(f"fastattn.check.{arguments.command}").main(options)
    except KeyboardInterrupt:
        parser.exit(130, "stopped by Ctrl-C\n")  # the exit status of a shell


if __name__ == "__main__":
    sys.exit(main())
