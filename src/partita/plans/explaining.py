"""Why a node is where it is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from partita.errors import UnknownNodeError
from partita.graphs.modes import AMBIENT
from partita.plans.treatment import Treatment
from partita.regions import Partition

__all__ = ["explanation"]


def explanation(partition: Partition, treatments: Sequence[Treatment], node: Node) -> str:
    """Where `node` runs, for which reason, under which mode, and what it must stay behind and before."""
    program = partition.program
    number = program.index.number.get(node)
    if number is None:
        raise UnknownNodeError(f"{node.name!r} is not a node of this program; take it from `program.graph`")
    lines = [f"{node.name}: {_where(partition, treatments, node)}"]
    mode = program.modes.at(number)
    if number in program.modes.toggles:
        lines.append("  it only switches a mode; whoever runs a node sets the mode that it needs")
    elif mode != AMBIENT:
        lines.append(f"  it runs under {mode}")
    lines += _order(partition, number)
    return "\n".join(lines)


def _where(partition: Partition, treatments: Sequence[Treatment], node: Node) -> str:
    place = partition.owner[partition.program.index.number[node]]
    named = next((region for region in partition.regions if node in region.nodes), None)
    if place >= 0:
        region = partition.regions[place]
        text = f"in region {region.name!r}, treated by {treatments[place]!r}"
        if region.label is not None:
            text += f", labelled {region.label!r}"
        if named is not region:
            text += ", where the container is made that it takes an item from"
        return text
    if node.op in ("placeholder", "output"):
        return f"{'an input' if node.op == 'placeholder' else 'the output'} of the program; in no region"
    reason = partition.reasons.get(node)
    if reason is None and node.op == "get_attr":
        reason = "attributes are read outside and passed in"
    return f"outside every region{f': {reason}' if reason else ''}"


def _order(partition: Partition, number: int) -> list[str]:
    effects, nodes = partition.program.effects, partition.program.index.nodes
    before = [nodes[a].name for a, b in zip(effects.before, effects.after, strict=True) if b == number]
    after = [nodes[b].name for a, b in zip(effects.before, effects.after, strict=True) if a == number]
    lines = []
    if number in effects.barriers:
        lines.append("  nobody knows what it does, so nothing with an effect moves past it")
    if before:
        lines.append(f"  stays after {', '.join(before)}: memory, random numbers or side effects")
    if after:
        lines.append(f"  stays before {', '.join(after)}: memory, random numbers or side effects")
    return lines
