"""The quotient of a graph by groups of its nodes: its edges, an order of it, the shortest cycle in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from partita.solvers.relation import components

#: The owner of a node is a group (0 and up), `ALONE` (a vertex of its own) or `NOWHERE` (no vertex at all).
ALONE, NOWHERE = -1, -2

#: A shortest cycle is searched from this many vertices, so that a hopeless partition still fails in linear time.
_STARTS_TRIED = 32


@dataclass(frozen=True, slots=True)
class Quotient:
    """The vertices with the number of their first node, and for each edge a pair of nodes that causes it.

    Group `g` is vertex `g`; a node `i` that stands alone is vertex `groups + i`.
    """

    groups: int
    first: dict[int, int]
    causes: dict[tuple[int, int], tuple[int, int]]

    def stable_order(self) -> list[int] | None:
        """The vertices in an order that obeys every edge, earliest first node first; None if there is a cycle."""
        order = stable_order(self.first, self.causes)
        return order if len(order) == len(self.first) else None

    def shortest_cycle(self) -> list[tuple[int, int]]:
        """The edges of a cycle that is the shortest through one of the vertices that are tried."""
        successors = _successors(self.causes)
        cyclic = [component for component in components(self.first, successors) if len(component) > 1]
        best: list[int] = []
        smallest = min(cyclic, key=len)
        for start in sorted(smallest)[:_STARTS_TRIED]:
            path = _path_back(start, successors, limit=len(best) or None)
            if path and (not best or len(path) < len(best)):
                best = path
            if len(best) == 2:
                break
        return list(zip(best, best[1:] + best[:1], strict=True))


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


def fused_order(
    owner: Sequence[int],
    lasts: Sequence[int],
    items: Mapping[int, int],
    *,
    data: Iterable[tuple[int, int]],
    effects: Iterable[tuple[int, int]],
    dropped: Collection[int],
) -> list[int]:
    """The steps after each group became a call, as close to their old order as all edges allow.

    A step is a node, by its number, or a call, by the last node of its group, whose place it takes; items of its
    result follow it. `items` maps each node that its group returns as one item of several to its step, from
    `len(owner)` on. The groups must be able to run one after another.
    """
    steps = _original_order(owner, lasts, items, dropped)
    rank = dict(zip(steps, range(len(steps)), strict=True))
    edges = [(rank[lasts[owner[number]]], rank[item]) for number, item in items.items()]
    for is_data, (source, target) in chain(((True, edge) for edge in data), ((False, edge) for edge in effects)):
        if source in dropped or target in dropped or (owner[source] == owner[target] != ALONE):
            continue
        before = items.get(source) if is_data else None
        if before is None:
            before = source if owner[source] == ALONE else lasts[owner[source]]
        after = target if owner[target] == ALONE else lasts[owner[target]]
        edges.append((rank[before], rank[after]))
    if all(before < after for before, after in edges):
        return steps
    order = stable_order({at: at for at in range(len(steps))}, edges)
    assert len(order) == len(steps), "the groups cannot run one after another"
    return [steps[at] for at in order]


def stable_order(first: Mapping[int, int], edges: Collection[tuple[int, int]]) -> list[int]:
    """The vertices in topological order, those with the smallest `first` first; without those that cycles hold up."""
    waits, successors = dict.fromkeys(first, 0), _successors(edges)
    for _, after in edges:
        waits[after] += 1
    ready = [(number, vertex) for vertex, number in first.items() if not waits[vertex]]
    heapify(ready)
    order: list[int] = []
    while ready:
        vertex = heappop(ready)[1]
        order.append(vertex)
        for after in successors.get(vertex, ()):
            waits[after] -= 1
            if not waits[after]:
                heappush(ready, (first[after], after))
    return order


def _original_order(
    owner: Sequence[int], lasts: Sequence[int], items: Mapping[int, int], dropped: Collection[int]
) -> list[int]:
    items_of: dict[int, list[int]] = {}
    for number, item in items.items():
        items_of.setdefault(owner[number], []).append(item)
    steps: list[int] = []
    for number, group in enumerate(owner):
        if number in dropped:
            continue
        if group == ALONE:
            steps.append(number)
        elif lasts[group] == number:
            steps += (number, *items_of.get(group, ()))
    return steps


def _successors(edges: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    successors: dict[int, list[int]] = {}
    for before, after in edges:
        successors.setdefault(before, []).append(after)
    return successors


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
