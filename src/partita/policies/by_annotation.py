"""ByAnnotation: nodes that carry one value under a key of their metadata form one region."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import Node

from partita.errors import OptionError
from partita.graphs.program import Program
from partita.policies.legal_partition import legal_partition
from partita.policies.places import Piece, no_places, placeable
from partita.regions import Partition

__all__ = ["ByAnnotation"]


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
