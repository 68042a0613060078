"""What a recomputed region keeps for the backward: a function from the region to some of its nodes.

Anybody's function will do, if it can be imported; these are frozen, so that plans can be compared and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, final

from torch import Tensor, nn
from torch.fx import Node

from partita._torch.schemas import signatures_of
from partita._torch.toggles import TOGGLES
from partita.errors import OptionError
from partita.graphs.chosen_operators import Chosen, Operator, checked_operators
from partita.graphs.later_writes import names_written
from partita.graphs.values import value_of
from partita.regions import Region
from partita.treatments.keep_names import check_node_names, check_operator_names
from partita.treatments.keep_worth import worth_keeping

__all__ = [
    "Keep",
    "KeepAtMost",
    "KeepEverything",
    "KeepExpensive",
    "KeepNodes",
    "KeepNothing",
    "KeepOperators",
    "gives_tensors",
    "keepable",
]

#: The nodes of a region whose results are kept.
Keep: TypeAlias = Callable[[Region], Iterable[Node]]


@final
@dataclass(frozen=True, slots=True)
class KeepNothing:
    """Keeps only what the region is given; all of it is computed again."""

    def __call__(self, region: Region) -> Iterable[Node]:
        return ()


@final
@dataclass(frozen=True, slots=True)
class KeepEverything:
    """Keeps what every node gives, as far as nobody writes to it."""

    def __call__(self, region: Region) -> Iterable[Node]:
        return keepable(region)


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepOperators:
    """Keeps the results of these operators, functions, methods or classes of modules, as the graph calls them.

    A name that torch would have to know, and does not, is refused; others may be somebody's classes or operators.
    """

    operators: tuple[Operator, ...]

    def __init__(self, *operators: Operator) -> None:
        object.__setattr__(self, "operators", checked_operators(operators))
        check_operator_names(name for name in self.operators if isinstance(name, str))

    def __call__(self, region: Region) -> Iterable[Node]:
        root = region.nodes[0].graph.owning_module
        chosen = Chosen(self.operators, nn.Module() if root is None else root)
        return [node for node in keepable(region) if node.op.startswith("call_") and node in chosen]

    def __repr__(self) -> str:
        return f"KeepOperators({', '.join(map(_shown, self.operators))})"


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepNodes:
    """Keeps the results of the nodes with these names; a name may be in any region of the plan, but must be one."""

    names: tuple[str, ...]
    _wanted: frozenset[str] = field(repr=False, compare=False)

    def __init__(self, *names: str) -> None:
        odd = [name for name in names if not isinstance(name, str)]
        if odd or not names:
            raise OptionError(f"KeepNodes takes names of nodes, not {odd[0] if odd else 'nothing'!r}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "_wanted", frozenset(names))

    def __call__(self, region: Region) -> Iterable[Node]:
        kept = [node for node in region.nodes if node.name in self._wanted]
        if len(kept) < len(self._wanted):
            check_node_names(self._wanted, region.nodes[0].graph)
        return kept

    def __repr__(self) -> str:
        return f"KeepNodes({', '.join(map(repr, self.names))})"


@final
@dataclass(frozen=True, slots=True)
class KeepExpensive:
    """Keeps what takes at least so many floating-point operations a byte to compute again, by the traced values.

    What would not be computed again, since nothing after it is needed by the backward, is not kept.
    """

    flops_per_byte: float = 1.0

    def __post_init__(self) -> None:
        if type(self.flops_per_byte) not in (int, float) or not self.flops_per_byte > 0:
            raise OptionError(f"flops_per_byte is a number above zero, not {self.flops_per_byte!r}")

    def __call__(self, region: Region) -> Iterable[Node]:
        worth = worth_keeping(region, keepable(region))
        return [node for node in worth if worth[node].flops_per_byte >= self.flops_per_byte]


@final
@dataclass(frozen=True, slots=True)
class KeepAtMost:
    """Keeps at most so many bytes in each region: what is dearest to compute again for its size comes first.

    What would not be computed again, since nothing after it is needed by the backward, is not kept.
    """

    bytes: int

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or self.bytes < 0:
            raise OptionError(f"bytes is a whole number, not {self.bytes!r}")

    def __call__(self, region: Region) -> Iterable[Node]:
        worth = worth_keeping(region, keepable(region))
        left, chosen = self.bytes, []
        for node in sorted(worth, key=lambda node: -worth[node].flops_per_byte):
            if worth[node].bytes <= left:
                left -= worth[node].bytes
                chosen.append(node)
        return chosen


def keepable(region: Region) -> list[Node]:
    """The nodes of a region whose results can be kept: they give tensors, and nobody writes to these."""
    written = names_written(region.nodes)
    return [
        node
        for node in region.nodes
        if node.op.startswith("call_")
        and node.target not in TOGGLES
        and node.name not in written
        and gives_tensors(node)
    ]


def gives_tensors(node: Node) -> bool:
    """Whether there is something to keep of what a node gives."""
    value = value_of(node)
    if value is not None:
        return any(isinstance(item, Tensor) for item in (value if isinstance(value, tuple | list) else (value,)))
    # Nobody has traced it, or it is one of torch's checks.
    signatures = signatures_of(node.target) if node.op == "call_function" else ()
    return not signatures or any(signature.returns for signature in signatures)


def _shown(operator: Operator) -> str:
    return repr(operator) if isinstance(operator, str) else str(getattr(operator, "__name__", operator))
