"""ByLabel: nodes that a function gives one label form one region."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.errors import CallbackError, OptionError
from partita.graphs.program import Program
from partita.policies.asking import asked
from partita.policies.naming import distinct_names
from partita.regions import Partition, Region

__all__ = ["ByLabel"]


@final
@dataclass(frozen=True, slots=True)
class ByLabel:
    """Regions by `label(node)`, asked once per operator in graph order; None leaves a node out."""

    label: Callable[[Node], Hashable]

    def __post_init__(self) -> None:
        if not callable(self.label):
            raise OptionError(f"ByLabel takes a function from nodes to labels, not {self.label!r}")

    def __call__(self, program: Program) -> Partition:
        nodes: dict[Hashable, list[Node]] = {}
        reasons: dict[Node, str] = {}
        for node in program.operators():
            label = asked(self.label, node, node=node, role="label function")
            if label is None:
                reasons[node] = "its label is None"
            else:
                _checked(nodes, label, node).append(node)
        return Partition(program, regions_by_label(nodes), reasons)


def _checked(nodes: dict[Hashable, list[Node]], label: Hashable, node: Node) -> list[Node]:
    try:
        return nodes.setdefault(label, [])
    except TypeError as error:
        raise CallbackError(
            f"the label of node {node.name!r} is {label!r}, which cannot be a key: {error}; give a name or a number"
        ) from error


def regions_by_label(nodes: dict[Hashable, list[Node]]) -> list[Region]:
    """A region for each label, named after it; labels that print alike get names that differ."""
    wanted = (label if isinstance(label, str) and label.isidentifier() else f"part_{label}" for label in nodes)
    return [
        Region(name, tuple(held), label)
        for name, (label, held) in zip(distinct_names(wanted), nodes.items(), strict=True)
    ]
