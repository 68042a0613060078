"""Few parts for units of several kinds, when a part holds units of one kind; and cutting, splitting, growing parts.

The fewest are NP-hard to find: chains of two kinds alone contain the shortest common supersequence. `few_steps`
simulates a run of the graph, and each time runs the kind from which the longest chain of parts is still to come, as
far as it goes; it does so from both ends, with two ways to break ties, and returns the best.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from partita.solvers.relation import REFUSED, Relation, components, relation

#: How many vertices a search may visit for each unit, on average, before it is given up.
_VISITS_PER_UNIT = 50
_VISITS_ANYWAY = 2_000_000


@dataclass(frozen=True, slots=True)
class Steps:
    """The step in which each unit runs, from 1 on, and the kind of each step; refused units run after their step."""

    levels: list[int]
    #: `kinds[s]` is the kind of step `s`; step 0 holds what runs before all others.
    kinds: list[int]

    def __len__(self) -> int:
        return len(self.kinds) - 1


def few_steps(relation: Relation, kinds: Sequence[int]) -> Steps:
    """Steps of one kind each, few of them, that obey the relation."""
    found = []
    for prefers_done in (False, True):
        found.append(_run(relation, kinds, prefers_done=prefers_done))
        found.append(_turned(_run(relation.reversed(), kinds, prefers_done=prefers_done), kinds))
    return min(found, key=len)


def _run(relation: Relation, kinds: Sequence[int], *, prefers_done: bool) -> Steps:
    schedule = _Schedule(relation, kinds, prefers_done=prefers_done)
    while (kind := schedule.next_kind()) is not None:
        schedule.run(kind)
    return Steps(schedule.levels, schedule.kinds)


def _turned(steps: Steps, kinds: Sequence[int]) -> Steps:
    """Steps of the reversed relation, counted from the front; a refused unit ran after its step, now before it."""
    count = len(steps)
    levels = [count - level + (0 if kinds[unit] == REFUSED else 1) for unit, level in enumerate(steps.levels)]
    return Steps(levels, [REFUSED, *reversed(steps.kinds[1:])])


class _Schedule:
    """The units that have run, the count that each unit waits for, and the ready ones by kind, highest first.

    Of kinds that reach the same height, the one with most ready units runs; with `prefers_done`, the one that leaves
    fewest units.
    """

    def __init__(self, relation: Relation, kinds: Sequence[int], *, prefers_done: bool) -> None:
        self._relation, self._kind_of, self._prefers_done = relation, kinds, prefers_done
        self._heights = _heights(relation, kinds)
        self._waits = [0] * len(relation)
        self._ready: dict[int, list[tuple[int, int]]] = {}
        self._remaining: dict[int, int] = {}
        # The ranks of kinds, best first, some of them outdated, and the kinds whose rank has changed since.
        self._ranks: list[tuple[int, int, int]] = []
        self._changed: dict[int, None] = {}
        self._free: list[int] = []
        self.levels, self.kinds = [0] * len(relation), [REFUSED]
        for unit in relation.order:
            self._waits[unit] = len(relation.predecessors[unit])
            self._remaining[kinds[unit]] = self._remaining.get(kinds[unit], 0) + 1
        for unit in relation.order:
            if not self._waits[unit]:
                self._release(unit)
        self._run_refused()

    def next_kind(self) -> int | None:
        """The kind to run next; None when all units have run."""
        for kind in filter(self._ready.__getitem__, self._changed):
            heappush(self._ranks, self._rank(kind))
        self._changed.clear()
        while self._ranks:
            rank = heappop(self._ranks)
            if self._ready[rank[2]] and rank == self._rank(rank[2]):
                return rank[2]
        return None

    def run(self, kind: int) -> None:
        """Runs all units of `kind` that can run, as one step, and then the refused ones."""
        self.kinds.append(kind)
        ready = self._ready[kind]
        while ready:
            self._remaining[kind] -= 1
            self._done(heappop(ready)[1])
        self._run_refused()

    def _rank(self, kind: int) -> tuple[int, int, int]:
        ready = self._ready[kind]
        left = self._remaining[kind] if self._prefers_done else 0
        return ready[0][0], left - len(ready), kind

    def _run_refused(self) -> None:
        while self._free:
            self._done(self._free.pop())

    def _done(self, unit: int) -> None:
        self.levels[unit] = len(self.kinds) - 1
        for after in self._relation.successors[unit]:
            self._waits[after] -= 1
            if not self._waits[after]:
                self._release(after)

    def _release(self, unit: int) -> None:
        kind = self._kind_of[unit]
        if kind == REFUSED:
            self._free.append(unit)
        else:
            heappush(self._ready.setdefault(kind, []), (-self._heights[unit], unit))
            self._changed[kind] = None


def _heights(relation: Relation, kinds: Sequence[int]) -> list[int]:
    """How many parts the longest path from each unit on needs."""
    heights = [0] * len(relation)
    for unit in reversed(relation.order):
        kind = kinds[unit]
        height = 0 if kind == REFUSED else 1
        for after in relation.successors[unit]:
            step = 0 if kind in (REFUSED, kinds[after]) else 1
            height = max(height, heights[after] + step)
        heights[unit] = height
    return heights


# The next four cut one part of a legal partition, in time linear in the part. No path leaves a part and comes back to
# it. So only what is inside matters, and what can run in the place of the part is legal in the whole.


def kept_parts(between: Relation, units: Sequence[int], kept: Collection[int]) -> list[list[int]]:
    """The fewest parts of `kept` if the other `units` of a part, all in an order that can run, run by themselves."""
    levels: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for unit in units:
        is_kept = unit in kept
        level = 1 if is_kept else 0
        for source in between.predecessors[unit]:
            reached = levels.get(source, -1)
            if reached >= level:
                level = reached + 1 if is_kept and source not in kept else reached
        levels[unit] = level
        if is_kept:
            parts.setdefault(level, []).append(unit)
    return [parts[level] for level in sorted(parts)]


def connected_parts(between: Relation, units: Sequence[int]) -> list[list[int]]:
    """The units of a part in parts that data connects, by their first units."""
    pieces = _linked(between, units)
    if len(pieces) == 1:
        return pieces
    piece_of = {unit: at for at, piece in enumerate(pieces) for unit in piece}
    found: list[list[int]] = []
    for component in components(range(len(pieces)), _edges_of_pieces(between, units, piece_of)):
        if len(component) == 1:
            found.append(pieces[component[0]])
        else:  # Effects lead from one piece to another and back.
            members = frozenset(unit for at in component for unit in pieces[at])
            found += _grown(between, [unit for unit in units if unit in members])
    position = {unit: at for at, unit in enumerate(units)}
    return sorted(found, key=lambda part: position[part[0]])


def deep_order(between: Relation, units: Sequence[int]) -> list[int]:
    """The units of a part in an order that can run, each shortly after what it reads, so that runs are connected."""
    inside, seen, order = frozenset(units), set[int](), list[int]()
    for last in reversed(units):
        path = [] if last in seen else [(last, _inside(between.predecessors[last], inside))]
        seen.add(last)
        while path:
            unit, rest = path[-1]
            for source in rest:
                if source not in seen:
                    seen.add(source)
                    path.append((source, _inside(between.predecessors[source], inside)))
                    break
            else:
                order.append(unit)
                path.pop()
    return order


def cut_in_order(units: Sequence[int], sizes: Mapping[int, int], largest: int) -> list[list[int]]:
    """The units, in an order that can run, in parts of at most the largest size; a unit alone may be larger."""
    parts: list[list[int]] = []
    held = largest
    for unit in units:
        if held + sizes[unit] > largest:
            parts.append([])
            held = 0
        parts[-1].append(unit)
        held += sizes[unit]
    return parts


def _linked(between: Relation, units: Sequence[int]) -> list[list[int]]:
    root = {unit: unit for unit in units}

    def find(unit: int) -> int:
        while root[unit] != unit:
            root[unit] = unit = root[root[unit]]
        return unit

    for unit in units:
        for source in _inside(between.reads[unit], root):
            root[find(source)] = find(unit)
    pieces: dict[int, list[int]] = {}
    for unit in units:
        pieces.setdefault(find(unit), []).append(unit)
    return list(pieces.values())


def _edges_of_pieces(between: Relation, units: Sequence[int], piece_of: Mapping[int, int]) -> dict[int, list[int]]:
    edges: dict[int, list[int]] = {}
    for unit in units:
        for source in _inside(between.predecessors[unit], piece_of):
            if piece_of[source] != piece_of[unit]:
                edges.setdefault(piece_of[source], []).append(piece_of[unit])
    return edges


def _grown(between: Relation, units: Sequence[int]) -> list[list[int]]:
    """Connected parts that grow along the data; single units where that would take too long."""
    position = {unit: at for at, unit in enumerate(units)}
    order = range(len(units))
    data = ((position[source], position[unit]) for unit in units for source in _inside(between.reads[unit], position))
    predecessors = (
        (position[source], position[unit]) for unit in units for source in _inside(between.predecessors[unit], position)
    )
    part_of = grown_parts(relation(order, order, data=data, effects=predecessors), [0] * len(units)) or order
    parts: dict[int, list[int]] = {}
    for unit, part in zip(units, part_of, strict=True):
        parts.setdefault(part, []).append(unit)
    return list(parts.values())


def _inside(found: Sequence[int], inside: Collection[int]) -> Iterator[int]:
    return (unit for unit in found if unit in inside)


def grown_parts(relation: Relation, kinds: Sequence[int]) -> list[int] | None:
    """A number for each unit, the same for those of one part; None where that would not take linear time.

    Every part is connected by data and holds units of one kind. From the last unit on, each joins the parts that read
    it, where no cycle arises.
    """
    growth = _Growth(relation, kinds)
    for unit in reversed(relation.order):
        growth.add(unit)
        if growth.visits > _VISITS_PER_UNIT * len(relation) + _VISITS_ANYWAY:
            return None
    return [growth.find(unit) for unit in range(len(relation))]


@final
class _Growth:
    """The graph of merged units: a vertex is called by one of its units.

    Every vertex has a height, and heights fall along every edge. So a path between two vertices can only lead through
    heights between theirs, and a search for one visits nothing else.
    """

    def __init__(self, relation: Relation, kinds: Sequence[int]) -> None:
        self.visits = 0
        self._relation, self._kinds = relation, kinds
        self._parent = list(range(len(relation)))
        self._sizes = [1] * len(relation)
        self._height = [0] * len(relation)
        self._successors: dict[int, set[int]] = {}
        self._predecessors: dict[int, set[int]] = {}

    def find(self, unit: int) -> int:
        """The vertex that `unit` is in."""
        parent = self._parent
        while parent[unit] != unit:
            parent[unit] = unit = parent[parent[unit]]
        return unit

    def add(self, unit: int) -> None:
        """Adds a unit that has no predecessors yet, and merges it with those that read it."""
        after = {self.find(target) for target in self._relation.successors[unit]}
        self._successors[unit], self._predecessors[unit] = after, set()
        for target in after:
            self._predecessors[target].add(unit)
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
        others = [vertex for vertex in self._neighbours(self._successors, top) if vertex != bottom]
        if height[top] > height[bottom] and self._reaches(others, bottom):
            return None
        raised = max(height[bottom], 1 + max((height[vertex] for vertex in others), default=0))
        vertex = self._joined(top, bottom)
        height[vertex] = raised
        self._raise_predecessors(vertex)
        return vertex

    def _reaches(self, starts: Iterable[int], bottom: int) -> bool:
        height, lowest = self._height, self._height[bottom]
        waiting = [vertex for vertex in starts if height[vertex] > lowest]
        seen = set(waiting)
        while waiting:
            for vertex in self._neighbours(self._successors, waiting.pop()):
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
        for table in (self._successors, self._predecessors):
            few, many = sorted((table[larger], table.pop(smaller)), key=len)
            many |= few
            table[larger] = many
        return larger

    def _raise_predecessors(self, vertex: int) -> None:
        """Puts all predecessors of `vertex` above it."""
        height, waiting = self._height, [vertex]
        while waiting:
            low = waiting.pop()
            for predecessor in self._neighbours(self._predecessors, low):
                if height[predecessor] <= height[low]:
                    height[predecessor] = height[low] + 1
                    waiting.append(predecessor)

    def _neighbours(self, table: dict[int, set[int]], vertex: int) -> set[int]:
        """The vertices in the entry of `vertex`, as they are called by now."""
        found = set(map(self.find, table[vertex]))
        found.discard(vertex)
        table[vertex] = found
        self.visits += 1 + len(found)
        return found
