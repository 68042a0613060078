"""`partita apply`: a plan carried out, and the result in a .pt2 file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita_cli.options import (
    AsJson,
    Imports,
    Operators,
    PlanPath,
    PolicyText,
    ProgramPath,
    TreatmentTexts,
    Trusted,
    examples,
)
from partita_cli.output import check_output, counted, say, say_json, whole_file, working
from partita_cli.sources import planner, read_program

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita apply model.pt2 --plan plan.json -o cut.pt2",
    "partita apply model.pt2 -p size:parts=4 -o cut.pt2",
    "partita apply model.pt2 -p capability:aot_inductor -t delegate -o fast.pt2",
)


def command(
    program: ProgramPath,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.pt2", help="The file to write.")],
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    marks: Annotated[
        bool, typer.Option("--marks", help="Only mark the nodes of each region, and cut nothing.", metavar="")
    ] = False,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> None:
    """Carry out a plan and write the new program; the old one stays as it is."""
    check_output(output, ".pt2", inputs=(program, plan))
    make = planner(policy=policy, treatments=treatment, plan=plan, imports=imports)
    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    made = make(read)
    with working("applying"):
        result = made.annotate() if marks else made.apply()
    with working(f"writing {output}"), whole_file(output) as draft:
        result.save(draft)
    facts = {"file": str(output), "regions": len(made.partition), "bytes": output.stat().st_size}
    if json:
        say_json(facts)
    else:
        regions = counted(len(made.partition), "region")
        # Regions that a backend has compiled are calls of its operator, and have no gradients.
        from partita.treatments import Delegate

        is_delegated = any(isinstance(one, Delegate) for one in made.treatments)
        words = " --operators partita::delegate --no-gradients" if is_delegated else ""
        words += "".join(f" --import {name}" for name in imports or ())
        say(f"{output}: {regions}; next: partita verify {program} {output}{words}")
