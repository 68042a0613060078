"""`partita explain`: why a node is where it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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
from partita_cli.output import plain_data, say, say_json
from partita_cli.sources import planner, read_program

if TYPE_CHECKING:
    from torch.fx import Node

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita explain model.pt2 softmax_3 --plan plan.json",
    "partita explain model.pt2 softmax_3 -p capability:inductor",
    "partita explain model.pt2 softmax_3",
)


def command(
    program: ProgramPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of a node; partita plan --json has them.")],
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> None:
    """Say what a node does, where a plan puts it and why, its mode, and what it must stay after or before."""
    import partita

    has_plan = policy is not None or plan is not None or bool(treatment)
    make = planner(policy=policy, treatments=treatment, plan=plan, imports=imports) if has_plan else None
    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    made = make(read) if make else partita.Plan(partita.Partition(read, []), ())
    found = made.program.node(node)  # A plan may be for the mode blocks in their other form.
    why = made.explanation(found)
    if json:
        say_json({"calls": _call(found), "value": _value(found), **plain_data(asdict(why))})
        return
    value = _value(found)
    say(f"{found.name} = {_call(found)}" + (f"  # {value}" if value else ""))
    say(str(why) if has_plan else _without_place(str(why)))


def _without_place(text: str) -> str:
    """An explanation without the region, since there is no plan."""
    first, *rest = text.splitlines()
    return "\n".join(rest) or f"  {first.partition(':')[0]} may go into any region: nothing orders it but data"


def _call(node: Node) -> str:
    name = str(node.target) if "<" not in str(node.target) else str(getattr(node.target, "__name__", node.target))
    inside = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
    return f"{name}({inside})" if node.op.startswith("call_") else f"{node.op} {name}"


def _value(node: Node) -> str:
    from torch import Tensor

    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
