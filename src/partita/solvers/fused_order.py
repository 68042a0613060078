"""The order of a graph after groups of its nodes became calls: everything stays where it was, as far as it can.

Numbers only. A call takes the place of the last node of its group, and the items that are taken out of its result
follow it; among the steps that wait for nothing, the one that stood first comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

__all__ = ["fused_order"]

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
