"""The orders in which torch writes the parts of a split, where they obey every dependency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.regions import Partition as RegionPartition
from partita.solvers.quotient import quotient

__all__ = ["alone_first", "lifo_order", "original_order"]


def lifo_order(partition: RegionPartition) -> list[int]:
    """Last in, first out over the parts without open dependencies; torch's order, kept unless it breaks an effect."""
    index, parts = partition.program.index, len(partition)
    every = _between_parts(partition.quotient.causes, parts)
    if not len(partition.program.effects.before):
        return alone_first(partition, _lifo(parts, every))
    order = _lifo(parts, _between_parts(quotient(partition.owner, parts, index.edges()).causes, parts))
    place = {part: at for at, part in enumerate(order)}
    if any(place[before] > place[after] for before, after in every):
        order = _lifo(parts, every)
    return alone_first(partition, order)


def original_order(partition: RegionPartition) -> list[int]:
    """Parts by first appearance, each after the attributes that it is the first to read."""
    parts, nodes = len(partition), partition.program.index.nodes
    order: dict[int, None] = {}
    for vertex in partition.order:
        if vertex < parts:
            for crossing in partition.borders.of_regions[vertex].inputs:
                if isinstance(crossing, int) and nodes[crossing].op == "get_attr":
                    order.setdefault(parts + crossing)
            order.setdefault(vertex)
        elif nodes[vertex - parts].op != "get_attr":
            order.setdefault(vertex)
    # An attribute that only the output reads comes last; one that nobody outside reads is dropped, as torch drops it:
    # parts have modules of their own.
    number, owner = partition.program.index.number, partition.owner
    late = (vertex for vertex in partition.order if vertex not in order)
    return [*order, *(at for at in late if any(owner[number[user]] < 0 for user in nodes[at - parts].users))]


def alone_first(partition: RegionPartition, order: Iterable[int]) -> list[int]:
    """`order` of the parts, after everything that stands alone: attributes, and items of the inputs."""
    parts = len(partition)
    alone = [vertex for vertex in partition.order if vertex >= parts]
    return [*alone, *(vertex for vertex in order if vertex < parts)]


def _between_parts(edges: Iterable[tuple[int, int]], parts: int) -> list[tuple[int, int]]:
    return [(before, after) for before, after in edges if before < parts and after < parts]


def _lifo(parts: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    waits = [0] * parts
    successors: list[list[int]] = [[] for _ in range(parts)]
    for before, after in edges:
        waits[after] += 1
        successors[before].append(after)
    ready = [part for part in range(parts) if not waits[part]]
    order = []
    while ready:
        part = ready.pop()
        order.append(part)
        for after in successors[part]:
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return order
