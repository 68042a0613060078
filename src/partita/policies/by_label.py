"""Policies whose labels come from outside: annotations, a user's function, another policy on the forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

from torch.fx import Node

from partita._plain_help import PlainHelp
from partita.errors import OptionError
from partita.policies.constraints import check_flags
from partita.policies.legalize import Piece, assignable, distinct_names, legal_partition, unassigned, user_label
from partita.policies.matching import Names, check_match
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.equal_bodies import plain_key
from partita.regions.joint_forward import forward_part


@final
@dataclass(frozen=True, slots=True)
class ByAnnotation(metaclass=PlainHelp):
    """Regions by the value under `key` in the metadata, as of `torch.fx.traceback.annotate`; None is no value.

    Equal values form one region where one call can run them all, else as many regions as it takes; different values
    never share one. A program without the key is an error, unless `allow_empty`.
    """

    key: str
    _: KW_ONLY
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise OptionError(f"ByAnnotation takes the key under which nodes are annotated, not {self.key!r}")
        check_flags(self, "allow_empty")

    def __call__(self, program: Program) -> Partition:
        assignment, reasons = unassigned(program), dict[Node, str]()
        found: dict[tuple[Hashable, Hashable], int] = {}
        for number in assignable(program):
            node = program.index.nodes[number]
            # `annotate` writes below "custom", passes write beside it.
            custom = node.meta.get("custom")
            value = custom.get(self.key) if isinstance(custom, Mapping) else None
            value = node.meta.get(self.key) if value is None else value
            if value is None:
                reasons[node] = f"it has no annotation {self.key!r}"
            else:
                # Python's hashes of many values are equal, those of their plain keys are not.
                assignment[number] = found.setdefault((plain_key(value), _frozen(value)), len(found))
        if not found:
            check_match(self, program)
        pieces = [Piece(_name(self.key, value), value) for _, value in found]
        return legal_partition(program, assignment, pieces, reasons)

    def names(self, program: Program) -> Names:
        """The key, and the keys of annotations in the program."""
        return Names((self.key,), tuple(_keys_in(program)), "annotation", "keys of annotations in it")

    def has_match(self, partition: Partition) -> bool:
        """Whether there is a region."""
        return len(partition) > 0


@final
@dataclass(frozen=True, slots=True)
class ByLabel(metaclass=PlainHelp):
    """Regions by `label(node)`, called once per operator in graph order; None excludes a node.

    Items of a container are taken where the container is made, so a label that only such nodes have is no region.
    """

    label: Callable[[Node], Hashable]

    def __post_init__(self) -> None:
        if not callable(self.label):
            raise OptionError(f"ByLabel takes a function from nodes to labels, not {self.label!r}")

    def __call__(self, program: Program) -> Partition:
        nodes: dict[Hashable, list[Node]] = {}
        reasons: dict[Node, str] = {}
        for node in program.operators():
            label = user_label(self.label, node, role="label function")
            if label is None:
                reasons[node] = "its label is None"
            else:
                nodes.setdefault(label, []).append(node)
        reasons |= _without_regions_of_items(program, nodes)
        names = distinct_names(
            label if isinstance(label, str) and label.isidentifier() else f"part_{label}" for label in nodes
        )
        regions = [Region(name, tuple(held), label) for name, (label, held) in zip(names, nodes.items(), strict=True)]
        return Partition(program, regions, reasons)


@final
@dataclass(frozen=True, slots=True)
class InForward(metaclass=PlainHelp):
    """Regions of the forward of a joint graph, as `policy` finds them; it sees no node of the backward."""

    policy: Callable[[Program], Partition]

    def __post_init__(self) -> None:
        if not callable(self.policy) or isinstance(self.policy, type):
            raise OptionError(f"InForward takes a policy such as ByModule('layers.*'), not {self.policy!r}")

    def __call__(self, program: Program) -> Partition:
        part = forward_part(program)
        found = self.policy(part.program)
        if not isinstance(found, Partition):
            raise OptionError(f"a policy returns a Partition, not {type(found).__name__}; policy: {self.policy!r}")
        regions = [
            Region(region.name, tuple(part.original[node] for node in region.nodes), region.label) for region in found
        ]
        reasons = {part.original[node]: reason for node, reason in found.reasons.items()}
        if program.joint is None:
            return Partition(program, regions, reasons)  # It is a forward already, as in `joint_partition`.
        seen, joint = set(part.original.values()), program.joint
        reasons |= dict.fromkeys(joint.backward, "it belongs to the backward")
        reasons |= {node: "it must run after some of the backward" for node in joint.forward if node not in seen}
        return Partition(program, regions, reasons)


def _without_regions_of_items(program: Program, nodes: dict[Hashable, list[Node]]) -> dict[Node, str]:
    """Takes away the labels whose nodes only take items out of containers; returns a reason for each of these nodes."""
    number, items = program.index.number, program.projections
    alone = [label for label, held in nodes.items() if all(number[node] in items for node in held)] if items else []
    taken = [node for label in alone for node in nodes.pop(label)]
    return dict.fromkeys(taken, "it takes an item out of a container, which is done where the container is made")


def _keys_in(program: Program) -> Iterator[str]:
    """The keys of what was annotated, and of other metadata."""
    for node in program.operators():
        custom = node.meta.get("custom")
        yield from map(str, custom if isinstance(custom, Mapping) else ())
    for node in program.operators():
        yield from map(str, node.meta)


def _frozen(value: Any) -> Hashable:
    """`value` as a hashable one, containers included; what is not hashable equals only itself."""
    if isinstance(value, Mapping):
        return tuple(sorted(((_frozen(key), _frozen(item)) for key, item in value.items()), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_frozen, value))
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _ById:
    """A value that is compared by identity."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _name(key: str, value: Hashable) -> str:
    if isinstance(value, str) and value.isidentifier():
        return value
    return f"{key}_{value}" if isinstance(value, str | int) else key
