"""Labels: the region of each node, in the styles in which people and tools cut graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, final

from torch.fx import Graph, Node

from partita._torch.toggles import TOGGLES

#: For each node by name its region, or None where it is excluded.
Labels: TypeAlias = dict[str, int | None]


@final
@dataclass(frozen=True, slots=True)
class Labelling:
    """How to label a graph: a style of `LABEL_STYLES`, about how many regions, and what is excluded.

    `gap` excludes one node in `gap` (0: none), `toggles` says whether mode toggles get labels too, and `reverse`
    numbers the regions backwards, since labels need not grow along the graph.
    """

    style: str = "blocks"
    count: int = 2
    salt: int = 0
    gap: int = 0
    toggles: bool = True
    reverse: bool = False


def label(graph: Graph, labelling: Labelling) -> Labels:
    """The labels of all nodes: placeholders and the output have none, everything else may."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    numbers = LABEL_STYLES[labelling.style](nodes, labelling)
    labels: Labels = {node.name: None for node in graph.nodes}
    for place, (node, number) in enumerate(zip(nodes, numbers, strict=True)):
        if not _is_excluded(node, place, labelling):
            labels[node.name] = labelling.count - 1 - number if labelling.reverse else number
    return labels


def random_labels(graph: Graph, seed: int) -> Labels:
    """The labels of a seed."""
    return label(graph, random_labelling(seed))


def random_labelling(seed: int) -> Labelling:
    """The labelling of a seed."""
    source = Random(seed)
    return Labelling(
        style=source.choice(tuple(LABEL_STYLES)),
        count=source.randint(1, 5),
        salt=source.randrange(1 << 16),
        gap=source.choice((0, 0, 2, 3, 5)),
        toggles=source.random() < 0.5,
        reverse=source.random() < 0.3,
    )


def _is_excluded(node: Node, place: int, labelling: Labelling) -> bool:
    if node.target in TOGGLES and not labelling.toggles:
        return True
    return labelling.gap > 0 and _mixed(labelling.salt + 1, place) % labelling.gap == 0


def _blocks(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """Contiguous runs cut at random places, legal unless something in between is excluded."""
    cuts = sorted(_mixed(labelling.salt, number) % (len(nodes) + 1) for number in range(labelling.count - 1))
    return [sum(cut <= place for cut in cuts) for place in range(len(nodes))]


def _counter(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """A new region every few nodes, as a callback with a counter does."""
    length = max(1, -(-len(nodes) // labelling.count))
    return [place // length for place in range(len(nodes))]


def _interleaved(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """Any node anywhere, so that regions often need each other."""
    return [_mixed(labelling.salt, place) % labelling.count for place in range(len(nodes))]


def _by_target(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """Equal operators together, as support tables do."""
    names = [getattr(node.target, "__name__", node.target) for node in nodes]
    return [sum(map(ord, str(name))) % labelling.count for name in names]


def _levels(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """By depth along data edges: legal where only data counts, interleaved in the order of the graph."""
    depth: dict[Node, int] = {}
    for node in nodes:
        depth[node] = 1 + max((depth[read] for read in node.all_input_nodes if read in depth), default=0)
    deepest = max(depth.values(), default=1)
    return [(depth[node] - 1) * labelling.count // deepest for node in nodes]


def _threads(nodes: Sequence[Node], labelling: Labelling) -> list[int]:
    """Each node with the newest node that it reads, so that regions run beside one another."""
    threads: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        read = [other for other in node.all_input_nodes if other in threads]
        fresh = not read or _mixed(labelling.salt, place) % 4 == 0
        threads[node] = _mixed(labelling.salt, place) // 4 % labelling.count if fresh else threads[read[-1]]
    return [threads[node] for node in nodes]


def _mixed(salt: int, number: int) -> int:
    """A pseudorandom number, the same in every process."""
    mixed = (salt * 0x9E3779B1 + number * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return mixed ^ mixed >> 12


LABEL_STYLES: Mapping[str, Callable[[Sequence[Node], Labelling], list[int]]] = {
    "blocks": _blocks,
    "counter": _counter,
    "levels": _levels,
    "threads": _threads,
    "by_target": _by_target,
    "interleaved": _interleaved,
}
