"""A relation between units: groups of nodes that move as one, in an order in which they could run.

Numbers only. A unit is named by its first node; nodes that are in no unit have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["NO_UNIT", "Neighbours", "Relation", "relation"]

NO_UNIT = -1

#: For each unit others that it has to do with; those of a unit without any are an empty tuple.
Neighbours: TypeAlias = list[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Relation:
    """The units in an order in which they could run.

    `reads` and `readers` are the data; `behind` and `before` are all that must run earlier and later, data included.
    """

    order: Sequence[int]
    reads: Neighbours
    readers: Neighbours
    behind: Neighbours
    before: Neighbours

    def __len__(self) -> int:
        return len(self.reads)

    def reversed(self) -> Relation:
        """The same units with every edge turned round."""
        return Relation(self.order[::-1], self.readers, self.reads, self.before, self.behind)


def relation(
    unit_of: Sequence[int],
    order: Sequence[int],
    *,
    data: Iterable[tuple[int, int]],
    effects: Iterable[tuple[int, int]],
) -> Relation:
    """The relation of units in `order`, from the edges between their nodes."""
    reads, readers = _neighbours(unit_of, data)
    behind, before = reads[:], readers[:]
    for source, target in effects:
        one, other = unit_of[source], unit_of[target]
        if one != other and one >= 0 and other >= 0:
            behind[other] = [*behind[other], one] if behind[other] is reads[other] else _added(behind[other], one)
            before[one] = [*before[one], other] if before[one] is readers[one] else _added(before[one], other)
    return Relation(order, reads, readers, behind, before)


def _neighbours(unit_of: Sequence[int], data: Iterable[tuple[int, int]]) -> tuple[Neighbours, Neighbours]:
    empty: Sequence[int] = ()
    reads: Neighbours = [empty] * len(unit_of)
    readers: Neighbours = [empty] * len(unit_of)
    for source, target in data:
        one, other = unit_of[source], unit_of[target]
        if one != other and one >= 0 and other >= 0:
            if reads[other] is empty:
                reads[other] = [one]
            else:
                _added(reads[other], one)
            if readers[one] is empty:
                readers[one] = [other]
            else:
                _added(readers[one], other)
    return reads, readers


def _added(known: Sequence[int], unit: int) -> list[int]:
    assert isinstance(known, list)
    known.append(unit)
    return known
