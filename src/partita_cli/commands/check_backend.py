"""`partita check-backend`: whether a backend keeps the laws that hold for any compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from partita_cli.errors import CommandError
from partita_cli.options import AsJson, Imports, examples
from partita_cli.output import say, say_json, working
from partita_cli.sources import import_modules

if TYPE_CHECKING:
    from partita.testing import BackendReport

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita check-backend inductor",
    "partita check-backend mychip --import mychip.partita_backend --json",
)


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a backend; partita list backends.")],
    programs: Annotated[int, typer.Option("--programs", min=0, help="How many random programs are lowered.")] = 5,
    body: Annotated[
        list[str] | None, typer.Option("--body", metavar="BODY", help="Check this small body only; repeatable.")
    ] = None,
    imports: Imports = None,
    json: AsJson = False,
) -> int:
    """Check a backend on small bodies and on random programs; the status is 1 if it breaks a law."""
    with working(f"checking {name}"):
        import_modules(imports)
        check_backend = _check_backend()
        report = check_backend(name, programs=programs, bodies=body or None, raises=False)
    if json:
        say_json(report.as_dict())
    else:
        say(str(report))
    return 0 if report.holds else 1


def _check_backend() -> Callable[..., BackendReport]:
    try:
        from partita.testing import check_backend
    except ModuleNotFoundError as error:
        raise CommandError(f"checks need {error.name}: pip install 'partita[testing]'") from error
    return check_backend
