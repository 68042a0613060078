"""ByLabel, ByAnnotation, InForward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import Node

from partita.errors import CallbackError, OptionError
from partita.policies.legalize import Piece, asked, distinct_names, legal_partition, no_places, placeable
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.joint_forward import forward_part

__all__ = ["ByAnnotation", "ByLabel", "InForward"]


# ByAnnotation: nodes that carry one value under a key of their metadata form one region.


@final
@dataclass(frozen=True, slots=True)
class ByAnnotation:
    """Regions by the value under `key`, as `torch.fx.traceback.annotate` or a hand wrote it; None is no value.

    Equal values form one region where one call can run them all, else as many regions as it takes; different values
    never share one.
    """

    key: str

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise OptionError(f"ByAnnotation takes the key under which nodes are annotated, not {self.key!r}")

    def __call__(self, program: Program) -> Partition:
        places, reasons, found = no_places(program), dict[Node, str](), dict[Hashable, int]()
        for number in placeable(program):
            node = program.index.nodes[number]
            value = _annotation(node, self.key)
            if value is None:
                reasons[node] = f"it has no annotation {self.key!r}"
            else:
                places[number] = found.setdefault(_frozen(value), len(found))
        pieces = [Piece(_name(self.key, value), value) for value in found]
        return legal_partition(program, places, pieces, reasons)


def _annotation(node: Node, key: str) -> Any:
    """What `node` has under `key`: `annotate` writes below "custom", passes write beside it."""
    custom = node.meta.get("custom")
    if isinstance(custom, Mapping) and custom.get(key) is not None:
        return custom[key]
    return node.meta.get(key)


def _frozen(value: Any) -> Hashable:
    """`value` as something that can be compared and kept, containers opened; what cannot be is itself only."""
    if isinstance(value, Mapping):
        return tuple(sorted(((_frozen(key), _frozen(item)) for key, item in value.items()), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_frozen, value))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A value that equals nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _name(key: str, value: Hashable) -> str:
    if isinstance(value, str) and value.isidentifier():
        return value
    return f"{key}_{value}" if isinstance(value, str | int) else key


# ByLabel: nodes that a function gives one label form one region.


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


# InForward: the regions that another policy finds in the forward of a joint graph.


@final
@dataclass(frozen=True, slots=True)
class InForward:
    """Regions of the forward of a joint graph, as `policy` finds them; it sees no node of the backward."""

    policy: Callable[[Program], Partition]

    def __post_init__(self) -> None:
        if not callable(self.policy) or isinstance(self.policy, type):
            raise OptionError(f"InForward takes a policy such as ByModule('layers.*'), not {self.policy!r}")

    def __call__(self, program: Program) -> Partition:
        part = forward_part(program)
        found = self.policy(part.program)
        if not isinstance(found, Partition):
            raise OptionError(f"a policy gives a Partition, not {type(found).__name__}; policy: {self.policy!r}")
        regions = [
            Region(region.name, tuple(part.original[node] for node in region.nodes), region.label) for region in found
        ]
        reasons = {part.original[node]: reason for node, reason in found.reasons.items()}
        seen = set(part.original.values())
        joint = program.joint
        assert joint is not None
        reasons |= dict.fromkeys(joint.backward, "it belongs to the backward")
        reasons |= {node: "it must run after some of the backward" for node in joint.forward if node not in seen}
        return Partition(program, regions, reasons)
