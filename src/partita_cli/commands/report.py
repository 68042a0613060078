"""`partita report`: a plan to look at, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from partita_cli.commands.verify import check_compared
from partita_cli.errors import CommandError
from partita_cli.options import (
    Imports,
    InputsPath,
    Operators,
    PlanPath,
    PolicyText,
    ProgramPath,
    Seed,
    TreatmentTexts,
    Trusted,
    examples,
)
from partita_cli.output import check_output, remark, working
from partita_cli.sources import planner, read_inputs, read_program

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita report model.pt2 --plan plan.json -o report.html",
    "partita report model.pt2 -p size:parts=4 --verify -o report.json",
)


def command(
    program: ProgramPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.html", help="The file to write; its ending is the format.")
    ],
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Apply the plan, compare the result, and report that too.", metavar="")
    ] = False,
    format: Annotated[
        Literal["html", "json", "dot", "model_explorer"] | None,
        typer.Option(
            "--format", help="What to write, whatever the ending; node data for Model Explorer are JSON, too."
        ),
    ] = None,
    inputs: InputsPath = None,
    seed: Seed = 0,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
) -> int:
    """Write a page about a plan: its regions, its graph, why nodes are where they are.

    With --verify, the status is 1 if the result differs.
    """
    import partita

    if inputs is not None and not verify:
        raise CommandError("--inputs are for --verify: add that, or omit them")
    suffixes = () if format else (".html", ".htm", ".json", ".dot", ".gv")
    check_output(output, *suffixes, inputs=(program, plan, inputs))
    make = planner(policy=policy, treatments=treatment, plan=plan, imports=imports)
    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    made = make(read)
    comparison = None
    if verify:
        args, kwargs = read_inputs(inputs, read, seed)
        with working("comparing"):
            comparison = partita.compare(read, made.apply(), args, kwargs)
        check_compared(comparison)
    with working(f"writing {output}"):
        partita.report(made, comparison=comparison).save(output, format=format)
    remark(f"written: {output}")
    return 0 if comparison is None or comparison.equal else 1
