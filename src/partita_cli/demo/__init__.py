"""`partita demo`: what Partita does, in chapters, on small built-in models."""

from __future__ import annotations

from importlib import import_module

from partita_cli.options import examples

EPILOG = examples("partita demo")
_CHAPTERS = ("splitting", "wrong_answers", "modes", "lowering", "recomputing")


def command() -> int:
    """Show what Partita does, in chapters, on small built-in models; the status is 1 if something did not hold."""
    passed = True
    for number, name in enumerate(_CHAPTERS, 1):
        chapter = import_module(f"{__name__}.{name}")
        title = f"{number}. {chapter.TITLE}"
        print(f"\n{title}\n{'=' * len(title)}")
        passed &= chapter.show()
    print("\nAll of it held." if passed else "\nSomething did not hold; see above.")
    return 0 if passed else 1
