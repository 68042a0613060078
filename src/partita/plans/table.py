"""A plan as a table for people: one row a region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch.fx import Node

from partita.graphs.attributes import find
from partita.graphs.flops import Flops
from partita.graphs.values import bytes_of, bytes_of_value, container_items, value_of
from partita.plans.treatment import Treatment
from partita.regions import Partition
from partita.regions.borders import Crossing, Item
from partita.solvers.quotient import ALONE

__all__ = ["table"]

_HEAD = ("region", "nodes", "in", "out", "bytes in", "bytes out", "flops", "treatment", "label")


def table(partition: Partition, treatments: Sequence[Treatment]) -> str:
    """The regions in the order in which they will run, then what was left out and why."""
    rows, counter = [_HEAD], Flops()
    called = [vertex for vertex in partition.order if vertex < len(partition)]
    for place in called:
        region, border = partition.regions[place], partition.borders.of_regions[place]
        rows.append(
            (
                region.name,
                str(len(region)),
                str(len(border.inputs)),
                str(len(border.outputs)),
                _bytes(partition, border.inputs),
                _bytes(partition, border.outputs),
                _flops(region.nodes, counter),
                repr(treatments[place]),
                "" if region.label is None else str(region.label),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *_remarks(partition)])


def _bytes(partition: Partition, crossings: Iterable[Crossing]) -> str:
    """What the tensors among `crossings` take; a question mark where that is not known in advance."""
    nodes, total = partition.program.index.nodes, 0
    for crossing in crossings:
        if isinstance(crossing, int):
            size = bytes_of(nodes[crossing], partition.program.graph_module)
        elif isinstance(crossing, Item):
            items = container_items(nodes[crossing.number])
            size = 0 if items is None else bytes_of_value(items[crossing.place])
        else:
            size = 0
        if size is None:
            return "?"
        total += size
    return f"{total:,}"


def _flops(nodes: Sequence[Node], counter: Flops) -> str:
    """What the nodes of a region compute; a question mark where nobody traced their values."""
    if all(value_of(node) is None for node in nodes):
        return "?"
    return f"{counter.total(nodes):,}"


def _remarks(partition: Partition) -> list[str]:
    remarks = []
    for reason, count in Counter(partition.reasons.values()).most_common():
        remarks.append(f"left out: {count} {'node' if count == 1 else 'nodes'}: {reason}")
    silent = sum(node not in partition.reasons for node in _loose_operators(partition))
    if silent:
        remarks.append(f"left out: {silent} {'node' if silent == 1 else 'nodes'}: no reason given")
    nodes = partition.program.index.nodes
    barriers = [nodes[number] for number in partition.program.effects.barriers]
    if barriers:
        names = ", ".join(dict.fromkeys(_unknown(node, partition) for node in barriers))
        calls = "call" if len(barriers) == 1 else "calls"
        remarks.append(
            f"barriers: {len(barriers)} {calls} of what nobody knows ({names}); where these have no side effects, "
            "say so with Program.of(..., pure=[...])"
        )
    return remarks


def _loose_operators(partition: Partition) -> list[Node]:
    program, number = partition.program, partition.program.index.number
    settled = {*program.projections, *program.symbolic_scalars}
    return [
        node for node in program.operators() if partition.owner[number[node]] == ALONE and number[node] not in settled
    ]


def _unknown(node: Node, partition: Partition) -> str:
    if node.op == "call_module":
        return f"{type(find(partition.program.graph_module, str(node.target))).__name__} at {node.target!r}"
    return str(getattr(node.target, "__name__", node.target))
