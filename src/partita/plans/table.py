"""A plan as a table for people: one row a region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch.fx import Node

from partita.errors import PartitaError
from partita.graphs.attributes import find
from partita.graphs.flops import Flops
from partita.graphs.values import bytes_of, bytes_of_value, container_items, value_of
from partita.plans.holding import Holding, Holdings, Holds, holdings
from partita.plans.left_out import nodes_left_out
from partita.plans.treatment import Treatment
from partita.regions import Partition
from partita.regions.borders import Crossing, Item

__all__ = ["table"]

_HEAD = ("region", "nodes", "in", "out", "bytes in", "bytes out", "flops")
_HOLDING_HEAD = ("held", "held after", "extra flops")


def table(partition: Partition, treatments: Sequence[Treatment]) -> str:
    """The regions in the order in which they will run, then what was left out and why.

    Where a treatment says what autograd holds for its regions, three columns show that.
    """
    held = _holdings(partition, treatments)
    rows, counter = [(*_HEAD, *(_HOLDING_HEAD if held else ()), "treatment", "label")], Flops()
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
                *(_holding(held.regions[place], treatments[place]) if held else ()),
                repr(treatments[place]),
                "" if region.label is None else str(region.label),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *(_held(held) if held else ()), *_remarks(partition)])


def _bytes(partition: Partition, crossings: Iterable[Crossing]) -> str:
    """What the tensors among `crossings` take; a question mark where that is not known in advance."""
    nodes, total = partition.program.index.nodes, 0
    known: dict[int, tuple[object, ...] | None] = {}  # As many items may cross as a container has.
    for crossing in crossings:
        if isinstance(crossing, int):
            size = bytes_of(nodes[crossing], partition.program.graph_module)
        elif isinstance(crossing, Item):
            if crossing.number not in known:
                known[crossing.number] = container_items(nodes[crossing.number])
            items = known[crossing.number]
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


def _holdings(partition: Partition, treatments: Sequence[Treatment]) -> Holdings | None:
    """What the regions hold, if a treatment says it; a plan that cannot be carried out can still be printed."""
    if not any(isinstance(treatment, Holds) for treatment in treatments):
        return None
    try:
        return holdings(partition, treatments)
    except PartitaError as error:
        return Holdings((None,) * len(partition), reason=str(error))


def _holding(holding: Holding | None, treatment: Treatment) -> tuple[str, str, str]:
    """What a region holds; nothing for a treatment that does not say, question marks where it is not known."""
    if holding is None:
        return ("?", "?", "?") if isinstance(treatment, Holds) else ("", "", "")
    return _counts(holding)


def _counts(holding: Holding) -> tuple[str, str, str]:
    return _count(holding.plain_bytes), _count(holding.treated_bytes), _count(holding.extra_flops)


def _held(held: Holdings) -> list[str]:
    """The whole program in one line; memory of several regions counts once."""
    if held.total is None:
        return [f"held for the backward: not known: {held.reason}"]
    plain, treated, flops = _counts(held.total)
    return [f"held for the backward: {plain} bytes, {treated} after; {flops} FLOPs are computed again"]


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _remarks(partition: Partition) -> list[str]:
    remarks, outside = [], frozenset(nodes_left_out(partition))
    counted = Counter(reason for node, reason in partition.reasons.items() if node in outside).most_common()
    silent = sum(node not in partition.reasons for node in outside)
    for reason, count in (*counted, *([("no reason given", silent)] if silent else ())):
        remarks.append(f"left out: {count} {'node' if count == 1 else 'nodes'}: {reason}")
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


def _unknown(node: Node, partition: Partition) -> str:
    if node.op == "call_module":
        return f"{type(find(partition.program.graph_module, str(node.target))).__name__} at {node.target!r}"
    return str(getattr(node.target, "__name__", node.target))
