"""What a recomputed region keeps for the backward: a function from the region to some of its nodes.

Any function will do, if it can be imported; these are frozen, so that plans can be compared and printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from partita._plain_help import PlainHelp
from partita._torch.dry_runs import Allowance
from partita._torch.operator_schemas import OPERATORS, signatures_of
from partita._torch.toggles import TOGGLES
from partita.analysis.imported_names import imported
from partita.analysis.nodes import bytes_at_hints, value_of
from partita.errors import OptionError, RecomputeError
from partita.near_names import near_names
from partita.program._torch.saved_tensors import allocated_tensors
from partita.program.flops import Flops
from partita.program.operator_choice import Chosen, Operator, checked_operators
from partita.program.program import Program
from partita.program.saved_tensors import NodeDryRuns
from partita.regions import Region

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
class KeepNothing(metaclass=PlainHelp):
    """Keeps only the inputs of the region; all of it is recomputed."""

    def __call__(self, region: Region) -> Iterable[Node]:
        return ()


@final
@dataclass(frozen=True, slots=True)
class KeepEverything(metaclass=PlainHelp):
    """Keeps the result of every node, unless it is mutated."""

    def __call__(self, region: Region) -> Iterable[Node]:
        return keepable(region)


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepOperators(metaclass=PlainHelp):
    """Keeps the results of these operators, functions, methods or classes of modules, as the graph calls them.

    A name in torch's own namespaces that does not exist is refused; others may be classes or operators of the user.
    """

    operators: tuple[Operator, ...]

    def __init__(self, *operators: Operator) -> None:
        object.__setattr__(self, "operators", checked_operators(operators))
        _check_operator_names(name for name in self.operators if isinstance(name, str))

    def __call__(self, region: Region) -> Iterable[Node]:
        chosen = region.surroundings().once(self._chosen)
        return [node for node in keepable(region) if node.op.startswith("call_") and node in chosen]

    def _chosen(self, program: Program) -> Chosen:
        return Chosen(self.operators, program.graph_module)

    def __repr__(self) -> str:
        return f"KeepOperators({', '.join(map(_shown, self.operators))})"


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepNodes(metaclass=PlainHelp):
    """Keeps the results of the nodes with these names; a name may be in any region of the plan, but must exist."""

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
            region.surroundings().once(self._check_names)
        return kept

    def _check_names(self, program: Program) -> None:
        """Raises where the program has no node of that name: a misspelled one would silently keep nothing."""
        names = {node.name for node in program.graph.nodes}
        for name in sorted(self._wanted - names):
            raise RecomputeError(f"no node is called {name!r}, so it cannot be kept{_hint(name, names)}")

    def __repr__(self) -> str:
        return f"KeepNodes({', '.join(map(repr, self.names))})"


@final
@dataclass(frozen=True, slots=True)
class KeepExpensive(metaclass=PlainHelp):
    """Keeps what takes at least so many floating-point operations a byte to recompute, by the traced values.

    What would not be recomputed, since the backward needs nothing after it, is not kept.
    """

    flops_per_byte: float = 1.0

    def __post_init__(self) -> None:
        if type(self.flops_per_byte) not in (int, float) or not self.flops_per_byte > 0:
            raise OptionError(f"flops_per_byte is a number above zero, not {self.flops_per_byte!r}")

    def __call__(self, region: Region) -> Iterable[Node]:
        worth = _worth_keeping(region, keepable(region))
        return [node for node in worth if worth[node].flops_per_byte >= self.flops_per_byte]


@final
@dataclass(frozen=True, slots=True)
class KeepAtMost(metaclass=PlainHelp):
    """Keeps at most so many bytes in each region: what is most expensive to recompute for its size comes first.

    What would not be recomputed, since the backward needs nothing after it, is not kept.
    """

    bytes: int

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or self.bytes < 0:
            raise OptionError(f"bytes is a whole number from 0 on, not {self.bytes!r}")

    def __call__(self, region: Region) -> Iterable[Node]:
        worth = _worth_keeping(region, keepable(region))
        budget, chosen = self.bytes, []
        for node in sorted(worth, key=lambda node: -worth[node].flops_per_byte):
            if worth[node].bytes <= budget:
                budget -= worth[node].bytes
                chosen.append(node)
        return chosen


def keepable(region: Region) -> list[Node]:
    """The nodes of a region whose results can be kept: tensors that are not mutated."""
    mutated = region.surroundings().mutations.names_mutated(region.nodes)
    return [
        node
        for node in region.nodes
        if node.op.startswith("call_")
        and node.target not in TOGGLES
        and node.name not in mutated
        and gives_tensors(node)
    ]


def gives_tensors(node: Node) -> bool:
    """Whether the result of a node holds a tensor, according to its traced value or schema."""
    value = value_of(node)
    if value is not None:
        return any(isinstance(item, Tensor) for item in (value if isinstance(value, tuple | list) else (value,)))
    # It was not traced, or is one of torch's assertions.
    signatures = signatures_of(node.target) if node.op == "call_function" else ()
    return not signatures or any(signature.returns for signature in signatures)


def _shown(operator: Operator) -> str:
    return repr(operator) if isinstance(operator, str) else str(getattr(operator, "__name__", operator))


def _check_operator_names(names: Iterable[str]) -> None:
    """Raises where a name is in torch's own namespaces and does not exist.

    Custom operators may be registered later, and any other name may be that of a class of the user.
    """
    for name in names:
        plain = name.replace("::", ".").removeprefix("torch.ops.")
        if plain.startswith("aten.") and not _is_in_aten(plain):
            raise OptionError(f"torch has no operator {name!r}, so it cannot be kept{_hint(plain, _aten_names())}")
        module, _, function = plain.rpartition(".")
        if module.split(".")[0] == "torch" and module in sys.modules and imported(plain) is None:
            near = (f"{module}.{known}" for known, value in vars(sys.modules[module]).items() if callable(value))
            raise OptionError(f"{module!r} has no {function!r}, so it cannot be kept{_hint(plain, near)}")


def _is_in_aten(name: str) -> bool:
    """Whether ATen has the operator or overload `aten.name` or `aten.name.overload`, of which nothing else is read."""
    base, _, overload = name.removeprefix("aten.").partition(".")
    packet = getattr(torch.ops.aten, base, None) if base.isidentifier() else None
    return isinstance(packet, OPERATORS[1]) and (not overload or overload in packet.overloads())


def _aten_names() -> Iterator[str]:
    """The names of ATen's operators that were used before, or that functions and methods of torch have."""
    found = {*dir(torch.ops.aten), *dir(torch), *dir(torch.nn.functional), *dir(torch.Tensor)}
    return (f"aten.{name}" for name in sorted(found) if isinstance(getattr(torch.ops.aten, name, None), OPERATORS))


def _hint(name: str, known: Iterable[str]) -> str:
    near = near_names(name, sorted(known))
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


class _Savings(NamedTuple):
    """The FLOPs that keeping one result saves in a second run, and the bytes it takes."""

    flops: int
    bytes: int

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.bytes


def _worth_keeping(region: Region, nodes: Iterable[Node]) -> dict[Node, _Savings]:
    """Those of these nodes of a region whose keeping saves work in a second run, as far as traced values tell.

    A second run ends with the last tensor that autograd saves in the region: what comes later, and what is unused, is
    not recomputed for its own sake.
    """
    known = region.surroundings().once(_OperatorCosts.of)
    found = {
        node: _Savings(flops, known.bytes.of(node)) for node in nodes if node.users and (flops := known.flops.of(node))
    }
    if not found:
        return {}
    unneeded = _not_recomputed(region, known.trials)
    return {node: savings for node, savings in found.items() if savings.bytes and node not in unneeded}


class _OperatorCosts(NamedTuple):
    """Memoized costs of the operators of a graph, whose regions have many in common."""

    flops: Flops
    bytes: _KeptBytes
    trials: NodeDryRuns

    @staticmethod
    def of(_: Program) -> _OperatorCosts:
        return _OperatorCosts(Flops(), _KeptBytes(), NodeDryRuns())


def _not_recomputed(region: Region, trials: NodeDryRuns) -> set[Node]:
    """The nodes at the end of a region that a second run does not reach, or stops in before they compute."""
    found: set[Node] = set()
    for node in sorted(region.nodes, reverse=True):
        saves = trials.flops_until_saved(node)
        if saves is None:
            found.add(node)
            continue
        return found | {node} if saves == 0 else found
    return found


#: How many operators may run in all, and how many more for each node that is measured.
_CALLS, _MORE_CALLS = 20_000, 20


class _KeptBytes:
    """The bytes it takes to keep the results of nodes; equal operators on equal shapes are measured once.

    All that an operator allocates counts: attention keeps more than its result, a mask say. So an operator of torch is
    run on its traced inputs, which are fake tensors. For anything else, and where a run fails, only the result counts.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._allowance = Allowance(_CALLS)

    def of(self, node: Node) -> int:
        """The bytes for one node; symbolic sizes count as they were in the trace."""
        if not isinstance(node.target, OPERATORS):
            return bytes_at_hints(value_of(node))
        arguments: Any = map_arg((node.args, node.kwargs), value_of)
        key = (node.target, repr(arguments))
        if key not in self._known:
            self._allowance.add(_MORE_CALLS)
            allocated = allocated_tensors(node.target, *arguments, allowance=self._allowance)
            self._known[key] = bytes_at_hints(value_of(node) if allocated is None else allocated)
        return self._known[key]
