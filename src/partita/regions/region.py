"""Region, and reasons for nodes outside."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, final

from torch.fx import Node

from partita.errors import RegionError

__all__ = ["ONLY_SWITCHES", "Reason", "ReasonKind", "Region"]


# Reasons: words that say why a node is outside every region, with who decided it, so that reasons can be counted.


#: Why a mode switch is in no region.
ONLY_SWITCHES = "it only switches a mode"

#: Refused by whoever would treat the node; together with such a node; in a region that was not worthwhile; left out.
ReasonKind: TypeAlias = Literal["refused", "together", "not worthwhile", "left out"]


@final
class Reason(str):
    """A text that also knows its `kind`, `by` whom it was decided, and `why`."""

    __slots__ = ("by", "kind", "why")

    kind: ReasonKind
    by: str
    why: str

    def __new__(cls, text: str, *, kind: ReasonKind = "left out", by: str = "", why: str = "") -> Self:
        reason = super().__new__(cls, text)
        reason.kind, reason.by, reason.why = kind, by, why or text
        return reason

    @classmethod
    def refused(cls, by: str, why: str) -> Self:
        return cls(f"refused by {by}: {why}", kind="refused", by=by, why=why)

    @classmethod
    def of(cls, text: str) -> Self:
        """`text` itself where it is a reason, or a reason of that text."""
        return text if isinstance(text, cls) else cls(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (str(self), self.kind, self.by, self.why)


def _rebuilt(text: str, kind: ReasonKind, by: str, why: str) -> Reason:
    return Reason(text, kind=kind, by=by, why=why)


# A region: a name, a label, and nodes, which run in graph order.


@final
@dataclass(frozen=True, slots=True, repr=False)
class Region:
    """Operators that are treated as one; `label` is what the policy called them, `name` what the program will."""

    name: str
    nodes: tuple[Node, ...]
    label: Hashable = None

    def __post_init__(self) -> None:
        # torch.fx writes the name between quotes into the code that it generates, as it is.
        if _UNQUOTABLE.search(str(self.name)):
            raise RegionError(
                f"the name {self.name!r} of a region has a quote, a backslash or a sign that cannot be printed; it "
                "becomes the name of a module, so give it, or its label or affix, other letters"
            )
        object.__setattr__(self, "nodes", _distinct(self.name, self.nodes))
        if not self.nodes:
            raise RegionError(f"region {self.name!r} is empty; leave it out, or give it a node")
        held = [node.name for node in self.nodes if node.op in ("placeholder", "output")]
        if held:
            raise RegionError(
                f"region {self.name!r} holds {', '.join(map(repr, held))}: inputs and outputs of a program belong to "
                "no region; leave them out"
            )

    def __repr__(self) -> str:
        names = [node.name for node in self.nodes]
        shown = names if len(names) <= 4 else [*names[:2], "...", names[-1]]
        return f"Region({self.name!r}, {len(names)} nodes: {', '.join(shown)})"

    def __len__(self) -> int:
        return len(self.nodes)

    def inputs(self) -> tuple[Node, ...]:
        """The nodes outside whose values the region reads, in order of first use."""
        inside = set(self.nodes)
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return tuple(dict.fromkeys(source for source in read if source not in inside))

    def outputs(self) -> tuple[Node, ...]:
        """The nodes inside whose values are read outside, in graph order."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))


_UNQUOTABLE = re.compile(r'["\\\x00-\x1f\x7f]')


def _distinct(name: str, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes as a tuple, when they are nodes, each named once."""
    if isinstance(nodes, Node):
        raise RegionError(f"region {name!r} takes a collection of nodes; for a single one write ({nodes.name},)")
    held = tuple(nodes)
    if not all(isinstance(node, Node) for node in held):
        odd = next(node for node in held if not isinstance(node, Node))
        raise RegionError(f"region {name!r} holds {odd!r}, which is no node; take the nodes from `program.graph`")
    if len(set(held)) != len(held):
        twice = next(node for place, node in enumerate(held) if node in held[:place])
        raise RegionError(f"region {name!r} holds {twice.name!r} twice; name it once")
    return held
