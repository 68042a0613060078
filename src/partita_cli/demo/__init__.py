"""`partita demo`: what Partita does, in chapters, on small built-in models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from partita_cli.options import examples
from partita_cli.output import check_output, working

EPILOG = examples("partita demo", "partita demo -o demo.html")
_CHAPTERS = (
    "splitting",
    "wrong_answers",
    "modes",
    "lowering",
    "repeating",
    "recomputing",
    "fitting",
    "plan_files",
    "bisecting",
)


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.html", help="Where the page goes that it ends with.")
    ] = Path("partita-demo.html"),
) -> int:
    """Show what Partita does, in chapters, on small built-in models; it takes under a minute.

    The status is 1 if something did not hold.
    """
    check_output(output, ".html")
    with _on_one_thread():
        held = [_show(number, name) for number, name in enumerate(_CHAPTERS, 1)]
        _write_report(output)
    print("\nAll of it held." if all(held) else "\nSomething did not hold; see above.")
    return 0 if all(held) else 1


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """The models are so small that threads take longer to find each other than to compute."""
    with working("importing torch"):
        import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _show(number: int, name: str) -> bool:
    chapter = import_module(f"{__name__}.{name}")
    title = f"{number}. {chapter.TITLE}"
    print(f"\n{title}\n{'=' * len(title)}", flush=True)
    held: bool = chapter.show()
    return held


def _write_report(output: Path) -> None:
    """Writes the page about the fitted training step: its graph, its regions, its memory, and the comparison."""
    import partita
    from partita_cli.demo.fitting import compared, fitted

    _, _, plan = fitted()
    partita.report(plan.plan, comparison=compared(), memory=plan).save(output)
    print(f"\nThe plan of chapter {1 + _CHAPTERS.index('fitting')} to look at, in a browser: {output.absolute()}")
