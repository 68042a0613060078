"""Units, levels, strongly connected components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["NO_UNIT", "REFUSED", "Relation", "components", "earliest_levels", "latest_levels", "relation"]


# Strongly connected components: vertices that reach each other.


def components(vertices: Iterable[int], successors: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """The components of a graph, each after those that it leads to; linear, and without recursion (Tarjan)."""
    search = _Search(successors)
    for vertex in vertices:
        if vertex not in search.lowest:
            search.visit(vertex)
    return search.found


class _Search:
    """A depth-first search; `lowest` is the earliest vertex on the path that a vertex reaches, while it is open."""

    def __init__(self, successors: Mapping[int, Sequence[int]]) -> None:
        self.successors = successors
        self.lowest: dict[int, int] = {}
        self.open: dict[int, None] = {}
        self.found: list[list[int]] = []

    def visit(self, start: int) -> None:
        path = [(start, self._enter(start), iter(self.successors.get(start, ())))]
        while path:
            vertex, number, rest = path[-1]
            for after in rest:
                if after not in self.lowest:
                    path.append((after, self._enter(after), iter(self.successors.get(after, ()))))
                    break
                if after in self.open:
                    self.lowest[vertex] = min(self.lowest[vertex], self.lowest[after])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    self.lowest[above] = min(self.lowest[above], self.lowest[vertex])
                if self.lowest[vertex] == number:
                    self._close(vertex)

    def _enter(self, vertex: int) -> int:
        number = len(self.lowest)
        self.lowest[vertex] = number
        self.open[vertex] = None
        return number

    def _close(self, vertex: int) -> None:
        component = []
        while True:
            member, _ = self.open.popitem()
            component.append(member)
            if member == vertex:
                break
        self.found.append(component)


# Levels: the fewest parts for nodes that one backend accepts or refuses, in one pass.
#
# The level of a node is the number of parts on the longest path that ends in it: a path needs a new part wherever it
# comes from a refused node to an accepted one. Levels never fall along an edge, and rise from refused to accepted, so
# the accepted nodes of one level can run in one call, after those of the level before. A path with k such places
# needs k parts in any partition, so there is no smaller number.


#: The kind of a unit that no part may hold.
REFUSED = -1


def earliest_levels(relation: Relation, kinds: Sequence[int]) -> list[int]:
    """The lowest level of each unit; a refused unit runs after the part of its level."""
    levels = [0] * len(relation)
    behind = relation.behind
    for unit in relation.order:
        is_refused = kinds[unit] == REFUSED
        level = 0 if is_refused else 1
        for source in behind[unit]:
            reached = levels[source]
            if reached >= level:
                level = reached if is_refused or kinds[source] != REFUSED else reached + 1
        levels[unit] = level
    return levels


def latest_levels(relation: Relation, kinds: Sequence[int], highest: int) -> list[int]:
    """The highest level of each unit if there are `highest` parts."""
    levels = [highest] * len(relation)
    before = relation.before
    for unit in reversed(relation.order):
        is_refused = kinds[unit] == REFUSED
        level = highest
        for target in before[unit]:
            allowed = levels[target]
            if allowed <= level:
                level = allowed - 1 if is_refused and kinds[target] != REFUSED else allowed
        levels[unit] = level
    return levels


# A relation between units: groups of nodes that move as one, in an order in which they could run.
#
# Numbers only. A unit is named by its first node; nodes that are in no unit have none.


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
