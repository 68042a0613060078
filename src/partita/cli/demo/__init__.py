"""`partita demo`: what Partita does, in chapters, on small built-in models."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from partita.cli.demo import lowering, modes, recomputing, splitting, wrong_answers

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_to", "run"]


_CHAPTERS = (splitting, wrong_answers, modes, lowering, recomputing)


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("demo", help="cut a small transformer, and see what torch gets wrong")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs every chapter; the status is 1 if one of them found a difference."""
    passed = True
    for number, chapter in enumerate(_CHAPTERS, 1):
        title = f"{number}. {chapter.TITLE}"
        print(f"\n{title}\n{'=' * len(title)}")
        passed &= chapter.show()
    print("\nAll of it held." if passed else "\nSomething did not hold; see above.")
    return 0 if passed else 1
