"""Region: named nodes that are treated as one; and reasons for nodes outside of all regions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias, final

from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.errors import RegionError
from partita.program.program import Program

#: Why a mode toggle is in no region.
ONLY_SWITCHES = "it only switches a mode"

#: Refused by a capability; together with such a node; in a region that was not worthwhile; excluded otherwise.
ReasonKind: TypeAlias = Literal["refused", "together", "not worthwhile", "excluded"]

_UNQUOTABLE = re.compile(r'["\\]')


@final
@dataclass(frozen=True, slots=True, repr=False)
class Region(metaclass=PlainHelp):
    """Operators that are treated as one; `label` comes from the policy, `name` is used in the rewritten program."""

    name: str
    nodes: tuple[Node, ...]
    label: Hashable = None
    #: The program that a partition cuts into this and other regions; None for a region on its own.
    program: Program | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # torch.fx writes the name unescaped between quotes into the generated code.
        if _UNQUOTABLE.search(str(self.name)) or not str(self.name).isprintable():
            raise RegionError(
                f"the name {self.name!r} of a region has a quote, a backslash or an unprintable character; it becomes "
                "the name of a module, so change it, or its label or affix"
            )
        object.__setattr__(self, "nodes", _distinct(self.name, self.nodes))
        if not self.nodes:
            raise RegionError(f"region {self.name!r} is empty; omit it, or add a node")
        held = [node.name for node in self.nodes if node.op in ("placeholder", "output")]
        if held:
            raise RegionError(
                f"region {self.name!r} holds {', '.join(map(repr, held))}: inputs and outputs of a program belong to "
                "no region; remove them"
            )

    def __repr__(self) -> str:
        names = [node.name for node in self.nodes]
        shown = names if len(names) <= 4 else [*names[:2], "...", names[-1]]
        return f"Region({self.name!r}, {len(names)} nodes: {', '.join(shown)})"

    def __len__(self) -> int:
        return len(self.nodes)

    def of(self, program: Program) -> Region:
        """The same region, of this program."""
        if self.program is program:
            return self
        # Its name and nodes are known to be valid.
        region = object.__new__(Region)
        for name, value in (("name", self.name), ("nodes", self.nodes), ("label", self.label), ("program", program)):
            object.__setattr__(region, name, value)
        return region

    def surroundings(self) -> Program:
        """The program that it is a region of; for a region on its own, one made of its graph."""
        if self.program is not None:
            return self.program
        owner = self.nodes[0].graph.owning_module
        if not isinstance(owner, GraphModule):
            raise RegionError(
                f"region {self.name!r} is of a graph without a module; make a GraphModule of the graph, and a program "
                "of that with Program.of"
            )
        return Program(owner)

    def inputs(self) -> tuple[Node, ...]:
        """The nodes outside whose values the region reads, in order of first use."""
        inside = set(self.nodes)
        read = (source for node in self.nodes for source in node.all_input_nodes)
        return tuple(dict.fromkeys(source for source in read if source not in inside))

    def outputs(self) -> tuple[Node, ...]:
        """The nodes inside whose values are read outside, in graph order."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))


@final
class Reason(str):
    """Why a node is outside of all regions, with its `kind`, `by` which capability or node, and `why` in short."""

    __slots__ = ("by", "kind", "why")

    kind: ReasonKind
    by: str
    why: str

    def __new__(cls, text: str, *, kind: ReasonKind = "excluded", by: str = "", why: str = "") -> Self:
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


def _distinct(name: str, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes as a tuple, checked to be nodes without duplicates."""
    if isinstance(nodes, Node):
        raise RegionError(f"region {name!r} takes a collection of nodes; for a single one write ({nodes.name},)")
    held = tuple(nodes)
    if not all(isinstance(node, Node) for node in held):
        odd = next(node for node in held if not isinstance(node, Node))
        raise RegionError(f"region {name!r} holds {odd!r}, which is no node; take the nodes from `program.graph`")
    if len(set(held)) != len(held):
        twice = next(node for node, count in Counter(held).items() if count > 1)
        raise RegionError(f"region {name!r} holds {twice.name!r} twice; name it once")
    return held


def _rebuilt(text: str, kind: ReasonKind, by: str, why: str) -> Reason:
    return Reason(text, kind=kind, by=by, why=why)
