"""`partita plan`: the regions that a policy finds, with a treatment, before anything is done."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from partita_cli.output import check_output, remark, say_json, say_rows, working
from partita_cli.sources import planner, read_program

if TYPE_CHECKING:
    from partita import Plan
    from partita.program.flops import Flops

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita plan model.pt2 --policy size:parts=4",
    "partita plan model.pt2 -p capability:inductor,min_size=4 -t lower:inductor -o plan.json",
    "partita plan model.pt2 -p 'module:layers.*' -t recompute:keep=expensive",
    "partita plan model.pt2 -p 'module:layers.*,head' -t 'layers.*=recompute' -t head=lower:inductor",
)


def command(
    program: ProgramPath,
    policy: PolicyText = None,
    treatment: TreatmentTexts = None,
    plan: PlanPath = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN.json", help="Write the plan to this file.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print only how much is in regions, and why not.", metavar="")
    ] = False,
    operators: Operators = None,
    imports: Imports = None,
    trusted: Trusted = False,
    json: AsJson = False,
) -> None:
    """Show the regions that a policy makes and what a treatment does to them; nothing is changed."""
    check_output(output, ".json", inputs=(program, plan))
    make = planner(policy=policy, treatments=treatment, plan=plan, imports=imports)
    read = read_program(program, trusted=trusted, operators=operators, imports=imports)
    made = make(read)
    if output is not None:
        from partita import save_plan

        save_plan(made, output)
        remark(f"written to {output}")
    if json:
        say_json(data_of(made))
        return
    with working("counting"):
        text = made.summary() if summary else str(made)
    say_rows(text, rows=0 if summary else len(made.partition) + 2)


def data_of(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: regions in the order in which they run, and what is outside."""
    from partita.program.flops import Flops
    from partita.program.program import counted_operators

    order = [vertex for vertex in plan.partition.order if vertex < len(plan.partition)]
    counter = Flops()
    return {
        "nodes": len(plan.program.index),
        "operators": len(plan.program.once(counted_operators)),
        "regions": [_region(plan, vertex, counter) for vertex in order],
        "bodies": [asdict(body) for body in plan.bodies()],
        "excluded": [
            {"kind": one.kind, "by": one.by, "why": one.why, "operators": dict(one.operators)}
            for one in plan.excluded()
        ],
    }


def _region(plan: Plan, vertex: int, counter: Flops) -> dict[str, Any]:
    """One region; bytes are those at the sizes of the trace, and null where a size is only known at run time."""
    from partita.plans.report import border_bytes

    partition = plan.partition
    region, border = partition.regions[vertex], partition.borders.of_regions[vertex]
    bytes_in, bytes_out = border_bytes(partition, vertex)
    return {
        "name": region.name,
        "label": None if region.label is None else str(region.label),
        "nodes": [node.name for node in region.nodes],
        "operators": partition.operator_count(region),
        "inputs": len(border.inputs),
        "outputs": len(border.outputs),
        "bytes_in": bytes_in.size,
        "bytes_out": bytes_out.size,
        "dynamic_in": bytes_in.is_dynamic,
        "dynamic_out": bytes_out.is_dynamic,
        "flops": counter.total(region.nodes),
        "treatment": repr(plan.treatments[vertex]),
    }
