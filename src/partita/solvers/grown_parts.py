"""Parts that grow along the data: from the last unit on, each joins the parts that read it, where no cycle arises.

The merged units form a graph in which every vertex has a height, and heights fall along every edge. So a path between
two vertices can only lead through heights between theirs, and a search for one looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from partita.solvers.levels import REFUSED
from partita.solvers.relation import Relation

__all__ = ["grown_parts"]

#: How many vertices may be looked at for each unit, on average, before the search is given up.
_VISITS_PER_UNIT = 50
_VISITS_ANYWAY = 2_000_000


def grown_parts(relation: Relation, kinds: Sequence[int]) -> list[int] | None:
    """A number for each unit, the same for those of one part; None where that would not take linear time.

    Every part is connected by data and holds units of one kind.
    """
    growth = _Growth(relation, kinds)
    for unit in reversed(relation.order):
        growth.add(unit)
        if growth.visits > _VISITS_PER_UNIT * len(relation) + _VISITS_ANYWAY:
            return None
    return [growth.find(unit) for unit in range(len(relation))]


@final
class _Growth:
    """The graph of merged units: a vertex is called by one of its units."""

    def __init__(self, relation: Relation, kinds: Sequence[int]) -> None:
        self.visits = 0
        self._relation, self._kinds = relation, kinds
        self._parent = list(range(len(relation)))
        self._sizes = [1] * len(relation)
        self._height = [0] * len(relation)
        self._after: dict[int, set[int]] = {}
        self._behind: dict[int, set[int]] = {}

    def find(self, unit: int) -> int:
        """The vertex that `unit` is in."""
        parent = self._parent
        while parent[unit] != unit:
            parent[unit] = unit = parent[parent[unit]]
        return unit

    def add(self, unit: int) -> None:
        """Adds a unit that nothing stands before yet, and merges it with those that read it."""
        after = {self.find(target) for target in self._relation.before[unit]}
        self._after[unit], self._behind[unit] = after, set()
        for target in after:
            self._behind[target].add(unit)
        self._height[unit] = 1 + max((self._height[target] for target in after), default=0)
        if self._kinds[unit] == REFUSED:
            return
        vertex = unit
        for reader in self._relation.readers[unit]:
            other = self.find(reader)
            if self._kinds[other] == self._kinds[unit] and other != vertex:
                vertex = self._merged(vertex, other) or vertex

    def _merged(self, one: int, other: int) -> int | None:
        """The vertex of both, unless a path leads from one to the other through a third."""
        height = self._height
        top, bottom = (one, other) if height[one] > height[other] else (other, one)
        others = [vertex for vertex in self._neighbours(self._after, top) if vertex != bottom]
        if height[top] > height[bottom] and self._reaches(others, bottom):
            return None
        raised = max(height[bottom], 1 + max((height[vertex] for vertex in others), default=0))
        vertex = self._joined(top, bottom)
        height[vertex] = raised
        self._raise_behind(vertex)
        return vertex

    def _reaches(self, starts: Iterable[int], bottom: int) -> bool:
        height, lowest = self._height, self._height[bottom]
        waiting = [vertex for vertex in starts if height[vertex] > lowest]
        seen = set(waiting)
        while waiting:
            for vertex in self._neighbours(self._after, waiting.pop()):
                if vertex == bottom:
                    return True
                if height[vertex] > lowest and vertex not in seen:
                    seen.add(vertex)
                    waiting.append(vertex)
        return False

    def _joined(self, one: int, other: int) -> int:
        larger, smaller = (one, other) if self._sizes[one] >= self._sizes[other] else (other, one)
        self._parent[smaller] = larger
        self._sizes[larger] += self._sizes[smaller]
        for table in (self._after, self._behind):
            table[larger] = _united(table[larger], table.pop(smaller))
        return larger

    def _raise_behind(self, vertex: int) -> None:
        """Puts everything that stands before `vertex` above it."""
        height, waiting = self._height, [vertex]
        while waiting:
            low = waiting.pop()
            for behind in self._neighbours(self._behind, low):
                if height[behind] <= height[low]:
                    height[behind] = height[low] + 1
                    waiting.append(behind)

    def _neighbours(self, table: dict[int, set[int]], vertex: int) -> set[int]:
        """The vertices in the entry of `vertex`, as they are called by now."""
        found = set(map(self.find, table[vertex]))
        found.discard(vertex)
        table[vertex] = found
        self.visits += 1 + len(found)
        return found


def _united(one: set[int], other: set[int]) -> set[int]:
    if len(one) < len(other):
        one, other = other, one
    one |= other
    return one
