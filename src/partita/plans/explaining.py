"""Why a node is where it is, as data and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.errors import UnknownNodeError
from partita.graphs.mode import AMBIENT, Mode
from partita.plans.apart import path_into, path_out_of
from partita.plans.treatment import Treatment
from partita.regions import Partition
from partita.regions.reason import ONLY_SWITCHES, Reason
from partita.solvers.quotient import ALONE

__all__ = ["Explanation", "explanation"]


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a node is where it is; prints as text.

    `region` is where it runs, or None, and then `reason` says why. `path_in` leads from another region of the same
    label to the node through nodes outside, and `path_out` from the node to another such region: why these are not
    one region. It stays behind the nodes in `after` and before those in `before` although no data flows.
    """

    node: str
    where: str
    region: str | None
    reason: Reason | None
    mode: Mode
    path_in: tuple[str, ...]
    path_out: tuple[str, ...]
    after: tuple[str, ...]
    before: tuple[str, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.node}: {self.where}", *(f"  {remark}" for remark in self.remarks)]
        if self.path_in:
            lines.append(f"  cut from what is before by {' -> '.join(self.path_in)}")
        if self.path_out:
            lines.append(f"  cut from what is after by {' -> '.join(self.path_out)}")
        for what, names in (("after", self.after), ("before", self.before)):
            if names:
                lines.append(f"  stays {what} {', '.join(names)}: memory, random numbers or side effects")
        return "\n".join(lines)


def explanation(partition: Partition, treatments: Sequence[Treatment], node: Node) -> Explanation:
    """Where `node` runs, for which reason, under which mode, and what it must stay behind and before."""
    program = partition.program
    number = program.index.number.get(node)
    if number is None:
        raise UnknownNodeError(f"{node.name!r} is not a node of this program; take it from `program.graph`")
    region, reason = partition.region_of(node), partition.reasons.get(node)
    nodes, ordered = program.index.nodes, program.effect_neighbours
    return Explanation(
        node=node.name,
        where=_where(partition, treatments, node),
        region=None if region is None else region.name,
        reason=None if region is not None or reason is None else Reason.of(reason),
        mode=program.modes.at(number),
        path_in=tuple(step.name for step in path_into(partition, node)),
        path_out=tuple(step.name for step in path_out_of(partition, node)),
        after=tuple(nodes[other].name for other in ordered.before.get(number, ())),
        before=tuple(nodes[other].name for other in ordered.after.get(number, ())),
        remarks=tuple(_remarks(partition, number)),
    )


def _remarks(partition: Partition, number: int) -> Iterator[str]:
    program = partition.program
    mode = program.modes.at(number)
    if number in program.modes.toggles:
        is_said = partition.reasons.get(program.index.nodes[number]) == ONLY_SWITCHES
        yield f"{'' if is_said else f'{ONLY_SWITCHES}; '}whoever runs a node sets the mode that it needs"
    elif mode != AMBIENT:
        yield f"it runs under {mode}"
    if number in program.effects.barriers:
        yield "nobody knows what it does, so nothing with an effect moves past it"


def _where(partition: Partition, treatments: Sequence[Treatment], node: Node) -> str:
    number = partition.program.index.number[node]
    place = partition.owner[number]
    if number in partition.copies:
        names = [repr(partition.regions[at].name) for at in sorted(partition.copies[number])]
        names += ["outside every region"] if place == ALONE else []
        return f"a number that is computed wherever it is read: {', '.join(names)}"
    if place >= 0:
        region = partition.regions[place]
        text = f"in region {region.name!r}, treated by {treatments[place]!r}"
        if region.label is not None:
            text += f", labelled {region.label!r}"
        if node not in region.nodes:
            is_scalar = number in partition.program.symbolic_scalars
            text += f", {_ONLY_READER if is_scalar else 'where the container is made that it takes an item from'}"
        return text
    if node.op in ("placeholder", "output"):
        return f"{'an input' if node.op == 'placeholder' else 'the output'} of the program; in no region"
    reason = partition.reasons.get(node)
    if reason is None and node.op == "get_attr":
        reason = "attributes are read outside and passed in"
    return f"outside every region{f': {reason}' if reason else ''}"


_ONLY_READER = "the only one that reads this number"
