"""The command line, one module for each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from partita.cli import demo

__all__ = ["main"]


_COMMANDS = (demo,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named on the command line; the exit status is 0 where it did what it says."""
    parser = argparse.ArgumentParser(prog="partita", description="Cuts PyTorch graphs and checks the result.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status
