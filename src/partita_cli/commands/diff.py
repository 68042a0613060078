"""`partita diff`: what another plan changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita_cli.options import AsJson, Imports, Operators, Trusted, examples
from partita_cli.output import say, say_json
from partita_cli.sources import read_program

NEEDS_ARGUMENTS = True
EPILOG = examples("partita diff last-week.json today.json --program model.pt2")


def command(
    one: Annotated[Path, typer.Argument(metavar="PLAN1.json", help="A plan.")],
    other: Annotated[Path, typer.Argument(metavar="PLAN2.json", help="Another plan for the same program.")],
    program: Annotated[Path, typer.Option("--program", metavar="MODEL.pt2", help="The program that both are for.")],
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> int:
    """Say what the second plan changes: regions, their nodes, their treatments. The status is 1 if they differ."""
    import partita

    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    found = partita.load_plan(one, read).diff(partita.load_plan(other, read))
    if json:
        say_json({"equal": not found, "lines": list(found.lines)})
    else:
        say(str(found))
    return 1 if found else 0
