"""Why regions are apart: the shortest path from one to the other through what no region holds."""

from __future__ import annotations

from collections import deque

from torch.fx import Node

from partita.regions import Partition
from partita.solvers.quotient import NOWHERE

__all__ = ["path_into", "path_out_of"]


def path_into(partition: Partition, node: Node) -> tuple[Node, ...]:
    """The shortest path that leaves a region of the same label and comes back into this node's, at `node`; or empty."""
    return _path(partition, node, backwards=True)[::-1]


def path_out_of(partition: Partition, node: Node) -> tuple[Node, ...]:
    """The shortest path from `node` out of its region and into another of the same label; or empty."""
    return _path(partition, node, backwards=False)


def _path(partition: Partition, node: Node, *, backwards: bool) -> tuple[Node, ...]:
    """Breadth first from `node`, through nodes outside all regions, to another region of the same label."""
    index, owner = partition.program.index, partition.owner
    start = index.number[node]
    if owner[start] < 0:
        return ()
    label = partition.regions[owner[start]].label
    both = partition.program.neighbours
    neighbours = both.before if backwards else both.after
    came_from: dict[int, int] = {start: -1}
    queue = deque([start])
    while queue:
        number = queue.popleft()
        for other in neighbours.get(number, ()):
            place = owner[other]
            if other in came_from or place == NOWHERE or place == owner[start]:
                continue
            came_from[other] = number
            if place < 0:
                queue.append(other)
            elif number != start and partition.regions[place].label == label:
                return _traced(partition, came_from, other)
    return ()


def _traced(partition: Partition, came_from: dict[int, int], last: int) -> tuple[Node, ...]:
    path = [last]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    return tuple(partition.program.index.nodes[number] for number in reversed(path))
