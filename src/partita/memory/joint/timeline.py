"""The timeline of a compiled step, from its joint graph as a compiler runs it."""

from __future__ import annotations

from torch.fx import Node

from partita.memory.joint.simulation import Simulated
from partita.memory.timeline import Moment, Occupant, Timeline
from partita.memory.trials import module_path


def joint_timeline(simulated: Simulated) -> Timeline:
    """The bytes after every operator that allocates, beside what is allocated throughout."""
    moments = tuple(
        Moment(phase, f"segment {segment}", str(node.target), node.name, module_path(node), size)
        for (node, size), (phase, segment) in zip(simulated.series, simulated.phases, strict=True)
    )
    return Timeline(moments, 0, 0, tuple(_occupants(simulated.occupants)))


def _occupants(sizes: dict[Node, int]) -> list[Occupant]:
    """What is allocated at the peak, largest first; results of equal operators and sizes are counted together."""
    groups: dict[tuple[int, str], list[Node]] = {}
    for node in sorted(sizes, key=lambda node: node.name):
        groups.setdefault((sizes[node], str(node.target)), []).append(node)
    found = [
        Occupant(size * len(nodes), len(nodes), _between(nodes), nodes[0].name, module_path(nodes[0]), operator)
        for (size, operator), nodes in groups.items()
    ]
    return sorted(found, key=lambda one: -one.bytes)


def _between(nodes: list[Node]) -> str:
    return "" if len(nodes) == 1 else f"{nodes[0].name} to {nodes[-1].name}"
