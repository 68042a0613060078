"""ByLabel: nodes that a function gives one label form one region."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.errors import CallbackError
from partita.graphs.program import Program
from partita.regions import Partition, Region

__all__ = ["ByLabel"]


@final
@dataclass(frozen=True, slots=True)
class ByLabel:
    """Regions by `label(node)`, asked once per operator in graph order; None leaves a node out."""

    label: Callable[[Node], Hashable]

    def __call__(self, program: Program) -> Partition:
        nodes: dict[Hashable, list[Node]] = {}
        reasons: dict[Node, str] = {}
        for node in program.operators():
            label = _asked(self.label, node)
            if label is None:
                reasons[node] = "its label is None"
            else:
                nodes.setdefault(label, []).append(node)
        return Partition(program, regions_by_label(nodes), reasons)


def regions_by_label(nodes: dict[Hashable, list[Node]]) -> list[Region]:
    """A region for each label, named after it; labels that print alike get names that differ."""
    regions, taken = [], set()
    for label, held in nodes.items():
        name = base = label if isinstance(label, str) and label.isidentifier() else f"part_{label}"
        count = 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        regions.append(Region(name, tuple(held), label))
    return regions


def _asked(label: Callable[[Node], Hashable], node: Node) -> Hashable:
    try:
        return label(node)
    except Exception as error:
        raise CallbackError(
            f"the label function raised {type(error).__name__} for node {node.name!r}: {error}; nothing was changed"
        ) from error
