"""What a report says, as plain values: the graph, the regions and their borders, checks, and the memory timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch.fx import Node

from partita.analysis.nodes import TracedBytes, container_items, sum_of_bytes, value_of, value_text
from partita.equivalence import Comparison
from partita.memory import Picture, Timeline
from partita.memory.picture import timeline_data
from partita.plans import Plan
from partita.plans.memory import SavedMemory
from partita.plans.report import bytes_of_crossings, plan_remarks, reported_memory
from partita.program.program import Program, counted_operators
from partita.regions import Partition
from partita.regions.borders import Constant, Crossing, Item
from partita.regions.equal_bodies import body_numbers
from partita.reports.graph_data import Texts, class_name, graph_data

FORMAT, VERSION = "partita report", 1


def report_data(plan: Plan, comparison: Comparison | None, picture: Picture | None) -> dict[str, Any]:
    """Everything that a report shows; texts of columns are numbers into `texts`."""
    texts = Texts()
    graph = graph_data(plan, texts)
    saved = reported_memory(plan.partition, plan.treatments)
    bodies = body_numbers(plan.partition)
    memory = None if picture is None else _memory(picture, texts)
    found = {
        "format": FORMAT,
        "version": VERSION,
        "torch": str(torch.__version__),
        "title": _title(plan.program),
        "kind": _kind(plan.program),
        "summary": plan.summary().splitlines(),
        "remarks": plan_remarks(plan.partition),
        **graph,
        "operators": len(plan.program.once(counted_operators)),
        "regions": _regions(plan, saved, bodies, graph, texts),
        "region_order": [vertex for vertex in plan.partition.order if vertex < len(plan.partition)],
        "bodies": _bodies(plan, bodies),
        "excluded": [{**asdict(group), "count": group.count} for group in plan.excluded()],
        "saved": None if saved is None else _saved_total(saved),
        "verification": None if comparison is None else {**asdict(comparison), "equal": comparison.equal},
        "failures": [asdict(failure) for failure in plan.failures],
        "compilations": [asdict(one) for one in plan.compilations],
        "memory": memory,
    }
    return {**found, "texts": texts.list()}


def _title(program: Program) -> str:
    """The class of the model, where the tracer recorded it."""
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        first = next(iter(stack.values()), None) if isinstance(stack, dict) else None
        if isinstance(first, tuple) and len(first) == 2 and first[0] in ("", "L['self']"):
            return class_name(first[1])
    return str(type(program.graph_module).__name__)


def _kind(program: Program) -> str:
    if program.joint is not None:
        return "joint graph"
    return "graph module" if program.export is None else "exported program"


def _regions(
    plan: Plan, saved: SavedMemory | None, bodies: list[int], graph: dict[str, Any], texts: Texts
) -> list[dict[str, Any]]:
    partition, number = plan.partition, plan.program.index.number
    flops, found = graph["nodes"]["flops"], []
    for at, (region, treatment) in enumerate(zip(partition, plan.treatments, strict=True)):
        border = partition.borders.of_regions[at]
        (inputs, bytes_in), (outputs, bytes_out) = (
            _crossings(partition, side, texts) for side in (border.inputs, border.outputs)
        )
        is_traced = any(value_of(node) is not None for node in region.nodes)
        own = None if saved is None else saved.regions[at]
        found.append(
            {
                "name": region.name,
                "label": None if region.label is None else str(region.label),
                "treatment": repr(treatment),
                "nodes": partition.operator_count(region),
                "inputs": inputs,
                "outputs": outputs,
                "bytes_in": bytes_in.size,
                "bytes_out": bytes_out.size,
                "dynamic_in": bytes_in.is_dynamic,
                "dynamic_out": bytes_out.is_dynamic,
                "flops": sum(flops[number[node]] for node in region.nodes) if is_traced else None,
                "saved_bytes": None if own is None else own.plain_bytes,
                "saved_bytes_after": None if own is None else own.treated_bytes,
                "recomputed_flops": None if own is None else own.extra_flops,
                "body": bodies[at],
            }
        )
    return found


def _crossings(
    partition: Partition, crossings: Iterable[Crossing], texts: Texts
) -> tuple[list[list[Any]], TracedBytes]:
    """What crosses a border: the number of the node, the place of an item or of a size in it, a text and the bytes.

    With it, the bytes of all of them.
    """
    nodes, crossings = partition.program.index.nodes, tuple(crossings)
    sizes = list(bytes_of_crossings(partition, crossings))
    found: list[list[Any]] = []
    for crossing, (size, _) in zip(crossings, sizes, strict=True):
        if isinstance(crossing, int):
            found.append([crossing, None, _text(nodes[crossing], texts), size])
        elif isinstance(crossing, Item):
            items = container_items(nodes[crossing.number])
            text = -1 if items is None else texts.number(value_text(items[crossing.place]))
            found.append([crossing.number, f"[{crossing.place}]", text, size])
        elif isinstance(crossing, Constant):
            number = partition.constants[crossing.number].number
            found.append([crossing.number, f".args[{crossing.place}]", texts.number(str(number)), size])
        else:
            found.append([crossing.number, f".size({crossing.axis})", texts.number("size"), size])
    return found, sum_of_bytes(sizes)


def _text(node: Node, texts: Texts) -> int:
    value = value_of(node)
    return -1 if value is None else texts.number(value_text(value))


def _bodies(plan: Plan, numbers: list[int]) -> list[dict[str, Any]]:
    calls: dict[int, list[int]] = {}
    for at, body in enumerate(numbers):
        calls.setdefault(body, []).append(at)
    return [
        {"name": body.name, "nodes": body.nodes, "regions": calls[at], "like": body.like, "difference": body.difference}
        for at, body in enumerate(plan.bodies())
    ]


def _saved_total(saved: SavedMemory) -> dict[str, Any]:
    total = saved.total
    return {
        "reason": saved.reason,
        "saved_bytes": None if total is None else total.plain_bytes,
        "saved_bytes_after": None if total is None else total.treated_bytes,
        "recomputed_flops": None if total is None else total.extra_flops,
        "parameter_bytes": saved.parameter_bytes,
        "gradient_bytes": saved.gradient_bytes,
    }


def _memory(picture: Picture, texts: Texts) -> dict[str, Any]:
    return {
        "title": picture.title,
        "headline": picture.headline,
        "budget_bytes": picture.budget_bytes,
        "planned": _timeline(picture.planned, texts),
        "plain": None if picture.plain is None else _timeline(picture.plain, texts),
        "plain_name": picture.plain_name,
    }


def _timeline(timeline: Timeline, texts: Texts) -> dict[str, Any]:
    moments = timeline.moments
    columns: dict[str, Any] = {
        name: [texts.number(getattr(moment, name)) for moment in moments]
        for name in ("phase", "segment", "operator", "node", "path")
    }
    return timeline_data(timeline, moments={**columns, "bytes": [moment.bytes for moment in moments]})
