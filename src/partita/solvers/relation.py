"""Dependencies between units, the groups of nodes that are assigned as one; their levels, and strong components.

A unit is the number of its first node. The kind of a unit says which part may hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

#: The unit of a node that is in none.
NO_UNIT = -1

#: The kind of a unit that no part may hold.
REFUSED = -1

#: The neighbours of each unit; an empty tuple for a unit without any.
Neighbours: TypeAlias = list[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Relation:
    """Dependencies between units, and an order in which they could run.

    `reads` and `readers` are data edges; `predecessors` and `successors` are all edges.
    """

    order: Sequence[int]
    reads: Neighbours
    readers: Neighbours
    predecessors: Neighbours
    successors: Neighbours

    def __len__(self) -> int:
        return len(self.reads)

    def reversed(self) -> Relation:
        """The same units with every edge reversed."""
        return Relation(self.order[::-1], self.readers, self.reads, self.successors, self.predecessors)


def relation(
    unit_of: Sequence[int], order: Sequence[int], *, data: Iterable[tuple[int, int]], effects: Iterable[tuple[int, int]]
) -> Relation:
    """The relation of units in `order`, from the edges between their nodes."""
    empty: Sequence[int] = ()
    reads: Neighbours = [empty] * len(unit_of)
    readers: Neighbours = [empty] * len(unit_of)
    for source, target in data:
        one, other = unit_of[source], unit_of[target]
        if one != other and one >= 0 and other >= 0:
            _append(reads, other, one)
            _append(readers, one, other)
    predecessors, successors = reads[:], readers[:]
    for source, target in effects:
        one, other = unit_of[source], unit_of[target]
        if one != other and one >= 0 and other >= 0:
            if predecessors[other] is reads[other]:  # Shared until the first effect.
                predecessors[other] = list(reads[other])
            if successors[one] is readers[one]:
                successors[one] = list(readers[one])
            _append(predecessors, other, one)
            _append(successors, one, other)
    return Relation(order, reads, readers, predecessors, successors)


def earliest_levels(relation: Relation, kinds: Sequence[int]) -> list[int]:
    """The lowest level of each unit: the number of parts on the longest path that ends in it.

    A path needs a new part wherever it leads from a refused unit to an accepted one, so no partition has fewer parts.
    Levels never fall along an edge, so the accepted units of one level can run in one call; a refused unit runs after
    the part of its level.
    """
    levels = [0] * len(relation)
    predecessors = relation.predecessors
    for unit in relation.order:
        is_refused = kinds[unit] == REFUSED
        level = 0 if is_refused else 1
        for source in predecessors[unit]:
            reached = levels[source]
            if reached >= level:
                level = reached if is_refused or kinds[source] != REFUSED else reached + 1
        levels[unit] = level
    return levels


def latest_levels(relation: Relation, kinds: Sequence[int], highest: int) -> list[int]:
    """The highest level of each unit if there are `highest` parts."""
    levels = [highest] * len(relation)
    successors = relation.successors
    for unit in reversed(relation.order):
        is_refused = kinds[unit] == REFUSED
        level = highest
        for target in successors[unit]:
            allowed = levels[target]
            if allowed <= level:
                level = allowed - 1 if is_refused and kinds[target] != REFUSED else allowed
        levels[unit] = level
    return levels


def components(vertices: Iterable[int], successors: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """The components of a graph, each after those that it leads to; linear, and without recursion (Tarjan)."""
    search = _Search(successors)
    for vertex in vertices:
        if vertex not in search.lowest:
            search.visit(vertex)
    return search.found


def _append(neighbours: Neighbours, unit: int, neighbour: int) -> None:
    known = neighbours[unit]
    if isinstance(known, list):
        known.append(neighbour)
    else:
        neighbours[unit] = [neighbour]


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
