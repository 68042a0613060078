"""What a plan leaves out, by reason, with the operators that it concerns: as data, and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.regions import Partition
from partita.regions.reason import Reason, ReasonKind
from partita.solvers.quotient import ALONE

__all__ = ["LeftOut", "left_out", "nodes_left_out"]

_SHOWN = 6


@final
@dataclass(frozen=True, slots=True)
class LeftOut:
    """Operators outside every region for one reason; `operators` counts them by what they call."""

    kind: ReasonKind
    by: str
    why: str
    operators: Mapping[str, int]

    @property
    def count(self) -> int:
        return sum(self.operators.values())

    def __str__(self) -> str:
        what = f"refused by {self.by}: {self.why}" if self.kind == "refused" else f"{_LEAD[self.kind]}{self.why}"
        most = Counter(self.operators).most_common()
        names = [f"{name} {count}" for name, count in most[:_SHOWN]]
        rest = sum(count for _, count in most[_SHOWN:])
        if rest:
            names.append(f"others {rest}")
        return f"{self.count} {'node' if self.count == 1 else 'nodes'} {what}: {', '.join(names)}"


_LEAD: Mapping[ReasonKind, str] = {
    "together": "left out, ",
    "not worthwhile": "not worthwhile: ",
    "left out": "left out: ",
}


def left_out(partition: Partition) -> tuple[LeftOut, ...]:
    """What is outside every region, the most frequent reason first."""
    found: dict[tuple[ReasonKind, str, str], Counter[str]] = {}
    for node in nodes_left_out(partition):
        reason = Reason.of(partition.reasons.get(node, "no reason given"))
        by = reason.by if reason.kind == "refused" else ""
        found.setdefault((reason.kind, by, reason.why), Counter())[_called(node)] += 1
    groups = [LeftOut(*key, dict(operators)) for key, operators in found.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))


def nodes_left_out(partition: Partition) -> Iterator[Node]:
    """The operators outside every region, and what switches modes, where a reason is given; in graph order.

    Items of containers, and numbers that are computed wherever they are read, do not count.
    """
    program = partition.program
    settled = {*program.projections, *program.symbolic_scalars}
    for number, node in enumerate(program.index.nodes):
        is_switch = number in program.modes.toggles and node in partition.reasons
        is_alone = partition.owner[number] == ALONE and node.op != "get_attr" and number not in settled
        if is_switch or is_alone:
            yield node


def _called(node: Node) -> str:
    """What a node calls, as a person would write it."""
    if node.op != "call_function":
        return str(node.target)
    text = str(node.target)
    return text if "<" not in text else str(getattr(node.target, "__name__", text))
