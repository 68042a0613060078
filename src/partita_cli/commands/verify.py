"""`partita verify`: whether two programs mean the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from partita import Comparison, Tolerance
    from partita.equivalence.verify import Location

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita verify model.pt2 cut.pt2",
    "partita verify model.pt2 fast.pt2 --inputs batch.pt --no-gradients --relative 1e-3",
    "partita verify model.pt2 --policy capability:inductor --treatment lower:inductor",
)


def command(
    program: ProgramPath,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER.pt2]", help="The program to compare; or give a plan for the first one."),
    ] = None,
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    inputs: InputsPath = None,
    seed: Seed = 0,
    gradients: Gradients = True,
    relative: Relative = None,
    absolute: Absolute = None,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> int:
    """Run two programs on the same inputs and compare values, gradients, state, aliasing, random state and modes.

    The status is 1 if they differ. Where they do by a plan, the region that differs by itself is named.
    """
    if (other is None) == (plan is None and policy is None):
        raise CommandError("give a second program, or a plan for the first one (--plan, or --policy and --treatment)")
    if other is not None and treatment:
        raise CommandError("a treatment is for a plan of the first program: omit it, or the second program")
    make = None if other is not None else planner(policy=policy, treatments=treatment, plan=plan, imports=imports)
    before = read_program(program, trusted=trusted, operators=operators, imports=imports)
    after = make(before).apply() if make else read_program(other or program, trusted=trusted, operators=operators)
    args, kwargs = read_inputs(inputs, before, seed)
    with working("comparing"):
        import partita
        from partita.equivalence.verify import located
        from partita.plans.compilations import logged_once

        tolerance = tolerance_of(relative, absolute)
        compared = partial(partita.compare, args=args, kwargs=kwargs, tolerance=tolerance, gradients=gradients)
        with logged_once():
            found = compared(before, after)
            where = None if found.equal or make is None else located(after, compared)
    check_compared(found)
    if json:
        say_json({**comparison_data(found), "located": _location_data(where)})
    else:
        say(str(found))
        if where is not None:
            say(str(where))
        if make is not None and not found.equal:
            remark("next: partita bisect with the same plan names the operators")
    return 0 if found.equal else 1


def _location_data(where: Location | None) -> dict[str, Any] | None:
    if where is None:
        return None
    found = where.found
    return {"blame": found.blame, "regions": [region.name for region in found.regions], "runs": where.runs}


def tolerance_of(relative: float | None, absolute: float | None) -> Tolerance | None:
    """The tolerance that was asked for; None for the one that the programs declare."""
    from partita import Tolerance

    return None if relative is None and absolute is None else Tolerance(relative or 0.0, absolute or 0.0)


def check_compared(found: Comparison) -> None:
    """Raises where the original fails in every call, since then nothing was compared."""
    if found.equal and found.calls and found.raised == found.calls:
        why = found.notes[0] if found.notes else "it raises in every call"
        raise CommandError(f"nothing could be compared, give inputs that the original accepts with --inputs: {why}")


def comparison_data(found: Comparison) -> dict[str, Any]:
    """A comparison as plain data."""
    return {
        "equal": found.equal,
        "calls": found.calls,
        "differences": [
            {"kind": one.kind, "where": one.where, "detail": one.detail, "when": one.when} for one in found.differences
        ],
        "notes": list(found.notes),
    }
