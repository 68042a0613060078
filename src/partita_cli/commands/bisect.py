"""`partita bisect`: the region of a plan because of which results differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita_cli.commands.verify import check_compared, comparison_data, tolerance_of
from partita_cli.errors import CommandError
from partita_cli.options import (
    Absolute,
    AsJson,
    Gradients,
    Imports,
    InputsPath,
    Operators,
    PlanPath,
    PolicyText,
    ProgramPath,
    Relative,
    Seed,
    TreatmentTexts,
    Trusted,
    examples,
)
from partita_cli.output import remark, say, say_json, working
from partita_cli.sources import planner, read_inputs, read_program

if TYPE_CHECKING:
    from partita import Bisection

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita bisect model.pt2 --plan plan.json --inputs batch.pt",
    "partita bisect model.pt2 -p capability:inductor -t lower:inductor --reproduce found/",
)


def command(
    program: ProgramPath,
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    inputs: InputsPath = None,
    seed: Seed = 0,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate", help="Run every trial in a process of its own, so that crashes are found.", metavar=""
        ),
    ] = False,
    reproduce: Annotated[
        Path | None,
        typer.Option("--reproduce", metavar="FOLDER", help="Write a script with inputs that shows it without Partita."),
    ] = None,
    gradients: Gradients = True,
    relative: Relative = None,
    absolute: Absolute = None,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> int:
    """Find the region, and the operators in it, because of which the result of a plan differs; by halving.

    The status is 1 if something differs.
    """
    _check_folder(reproduce)
    make = planner(policy=policy, treatments=treatment, plan=plan, imports=imports)
    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    made = make(read)
    args, kwargs = read_inputs(inputs, read, seed)
    with working("comparing parts of the plan"):
        import partita

        tolerance = tolerance_of(relative, absolute)
        found = partita.bisect(made, args, kwargs, isolate=isolate, tolerance=tolerance, gradients=gradients)
    check_compared(found.comparison)
    if json:
        regions, nodes = [region.name for region in found.regions], [node.name for node in found.nodes]
        data = {"blame": found.blame, "regions": regions, "nodes": nodes, "runs": found.runs}
        places = [asdict(place) for place in found.places]
        more = {"script": _written(found, reproduce)} if reproduce is not None else {}
        say_json({**data, "places": places, "comparison": comparison_data(found.comparison), **more})
    else:
        say(str(found))
        if reproduce is not None:
            _written(found, reproduce)
    return 0 if found.blame == "nothing" else 1


def _written(found: Bisection, folder: Path) -> str | None:
    """The path of the script; None, and a reason for the reader, where there is none."""
    from partita.errors import OptionError

    if found.blame == "nothing":
        return None
    try:
        with working("running the script"):
            path = found.reproduce(folder)
    except OptionError as error:
        remark(str(error))
        return None
    remark(f"written: {path}")
    return path


def _check_folder(path: Path | None) -> None:
    if path is not None and not (path.is_dir() or (not path.exists() and path.parent.is_dir())):
        raise CommandError(f"{path} is for a folder: give one, or a new name in a folder that is there")
