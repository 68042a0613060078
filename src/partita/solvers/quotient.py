"""Quotient graph, cycles, order after fusing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from partita.solvers.relation import components

__all__ = ["ALONE", "NOWHERE", "Quotient", "fused_order", "quotient"]


# The order of a graph after groups of its nodes became calls: everything stays where it was, as far as it can.
#
# Numbers only. A call takes the place of the last node of its group, and the items that are taken out of its result
# follow it; among the steps that wait for nothing, the one that stood first comes first.


#: A node whose owner is this stays a step of its own.
OUTSIDE = -1


def fused_order(
    owner: Sequence[int],
    lasts: Sequence[int],
    items: Mapping[int, int],
    *,
    data: Iterable[tuple[int, int]],
    effects: Iterable[tuple[int, int]],
    dropped: Collection[int],
) -> list[int]:
    """The steps in an order that obeys all edges: a node by its number, a call by the last one of its group.

    `items` gives the step of each node that its group gives as one item of several, from `len(owner)` on. The groups
    must be able to run one after another.
    """
    steps = _as_they_stood(owner, lasts, items, dropped)
    rank = dict(zip(steps, range(len(steps)), strict=True))
    edges: list[tuple[int, int]] = []
    for number, item in items.items():
        edges.append((rank[lasts[owner[number]]], rank[item]))
    for is_data, (source, target) in chain(((True, edge) for edge in data), ((False, edge) for edge in effects)):
        if source in dropped or target in dropped or (owner[source] == owner[target] != OUTSIDE):
            continue
        before = items.get(source) if is_data else None
        if before is None:
            before = source if owner[source] == OUTSIDE else lasts[owner[source]]
        after = target if owner[target] == OUTSIDE else lasts[owner[target]]
        edges.append((rank[before], rank[after]))
    if all(before < after for before, after in edges):
        return steps
    return [steps[at] for at in _earliest_first(len(steps), edges)]


def _as_they_stood(
    owner: Sequence[int], lasts: Sequence[int], items: Mapping[int, int], dropped: Collection[int]
) -> list[int]:
    items_of: dict[int, list[int]] = {}
    for number, item in items.items():
        items_of.setdefault(owner[number], []).append(item)
    steps: list[int] = []
    for number, group in enumerate(owner):
        if number in dropped:
            continue
        if group == OUTSIDE:
            steps.append(number)
        elif lasts[group] == number:
            steps += (number, *items_of.get(group, ()))
    return steps


def _earliest_first(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    waits, successors = [0] * count, dict[int, list[int]]()
    for before, after in edges:
        waits[after] += 1
        successors.setdefault(before, []).append(after)
    ready = [step for step in range(count) if not waits[step]]
    heapify(ready)
    order = []
    while ready:
        step = heappop(ready)
        order.append(step)
        for after in successors.get(step, ()):
            waits[after] -= 1
            if not waits[after]:
                heappush(ready, after)
    assert len(order) == count, "the groups cannot run one after another"
    return order


# The quotient of a graph by groups of its nodes: its edges, an order of it, or the shortest cycle in it.
#
# Numbers only. `owner[i]` says where node `i` belongs: a group (0 and up), `ALONE` (a vertex of its own) or `NOWHERE`
# (not part of the order at all). Group `g` is vertex `g`; a node `i` that stands alone is vertex `groups + i`.


ALONE, NOWHERE = -1, -2


@dataclass(frozen=True, slots=True)
class Quotient:
    """The vertices with the number of their first node, and for each edge one pair of nodes that causes it."""

    groups: int
    first: dict[int, int]
    causes: dict[tuple[int, int], tuple[int, int]]

    def stable_order(self) -> list[int] | None:
        """The vertices in an order that obeys every edge, earliest first node first; None if there is a cycle."""
        waits, successors = self._neighbours()
        ready = [(number, vertex) for vertex, number in self.first.items() if not waits[vertex]]
        heapify(ready)
        order: list[int] = []
        while ready:
            vertex = heappop(ready)[1]
            order.append(vertex)
            for after in successors.get(vertex, ()):
                waits[after] -= 1
                if not waits[after]:
                    heappush(ready, (self.first[after], after))
        return order if len(order) == len(self.first) else None

    def shortest_cycle(self) -> list[tuple[int, int]]:
        """The edges of a cycle than which none is shorter, among those through the vertices that are tried."""
        _, successors = self._neighbours()
        knots: list[list[int]] = [knot for knot in components(self.first, successors) if len(knot) > 1]
        best: list[int] = []
        smallest = min(knots, key=len)
        for start in sorted(smallest)[:_STARTS_TRIED]:
            path = _path_back(start, successors, limit=len(best) or None)
            if path and (not best or len(path) < len(best)):
                best = path
            if len(best) == 2:
                break
        return list(zip(best, best[1:] + best[:1], strict=True))

    def _neighbours(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        waits = dict.fromkeys(self.first, 0)
        successors: dict[int, list[int]] = {}
        for before, after in self.causes:
            waits[after] += 1
            successors.setdefault(before, []).append(after)
        return waits, successors


#: A shortest cycle is searched from this many vertices, so that a hopeless partition still fails in linear time.
_STARTS_TRIED = 32


def quotient(owner: Sequence[int], groups: int, edges: Iterable[tuple[int, int]]) -> Quotient:
    """The quotient graph of the nodes by `owner` under `edges`."""
    first: dict[int, int] = {}
    for number, group in enumerate(owner):
        if group >= 0:
            first.setdefault(group, number)
        elif group == ALONE:
            first[groups + number] = number
    causes: dict[tuple[int, int], tuple[int, int]] = {}
    for before, after in edges:
        source, target = owner[before], owner[after]
        if source == target and source >= 0:
            continue
        if source < 0:
            if source == NOWHERE:
                continue
            source = groups + before
        if target < 0:
            if target == NOWHERE:
                continue
            target = groups + after
        if (source, target) not in causes:
            causes[source, target] = (before, after)
    return Quotient(groups, first, causes)


def _path_back(start: int, successors: dict[int, list[int]], *, limit: int | None) -> list[int]:
    """The shortest cycle through `start`, as vertices from `start` on; empty if there is none under `limit`."""
    came_from: dict[int, int] = {}
    queue = deque([(start, 1)])
    while queue:
        vertex, length = queue.popleft()
        if limit is not None and length >= limit:
            return []
        for after in successors.get(vertex, ()):
            if after == start:
                path = [vertex]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if after not in came_from:
                came_from[after] = vertex
                queue.append((after, length + 1))
    return []
