"""Who takes a node; units that move as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torch import nn
from torch.fx import Node

from partita.analysis.functorch import transforms_found_once
from partita.analysis.symbols import Dimension, Symbols
from partita.backends.backend import Backend, find_backend, is_backend
from partita.errors import CallbackError, OptionError
from partita.policies.constraints import Apart, KeptApart, Together, group_nodes, order_of_units
from partita.policies.legalize import NO_REASON, asked, placeable
from partita.program.program import Program
from partita.regions.region import Reason
from partita.solvers.relation import NO_UNIT, REFUSED, Relation, relation

__all__ = ["Capability", "Units", "checked_capabilities", "name_of", "units_of", "waiting_for_symbols"]


# Units: what a policy by capability moves as one, each accepted by one taker or refused by all.


@dataclass(frozen=True, slots=True)
class Units:
    """The units, in which each node is; their kinds (one for each taker and for all that is kept apart)."""

    relation: Relation
    unit_of: Sequence[int]
    kinds: list[int]
    #: The taker of each kind, by place in the order of preference.
    takers: list[int]
    reasons: dict[Node, str]

    def members(self) -> dict[int, list[int]]:
        """The nodes of each unit in graph order, items of containers too."""
        members: dict[int, list[int]] = {}
        for number, unit in enumerate(self.unit_of):
            if unit >= 0:
                members.setdefault(unit, []).append(number)
        return members


def units_of(
    program: Program,
    capabilities: Sequence[Capability],
    *,
    together: Together | None,
    modes_apart: bool,
    devices_apart: bool,
    apart: Apart | None = None,
) -> Units:
    """The units of a program, asked for each operator."""
    numbers = list(placeable(program))
    unit_of, order = _units(program, numbers, together)
    takers, nodes = Takers(program, capabilities), program.index.nodes
    kept_apart = KeptApart(program, modes=modes_apart, devices=devices_apart, label=apart)
    kinds, reasons = [REFUSED] * len(unit_of), dict[Node, str]()
    known: dict[Hashable, int] = {}
    taker_of_kind: list[int] = []
    with transforms_found_once(program.graph):
        for unit, members in _grouped(numbers, unit_of, is_grouped=together is not None):
            held = [nodes[number] for number in members]
            taker = takers.taker_of(held)
            if isinstance(taker, Refusal):
                reasons.update(_reasons(held, taker))
                continue
            kind = kinds[unit] = known.setdefault((taker, kept_apart.shared_by(members)), len(known))
            if kind == len(taker_of_kind):
                taker_of_kind.append(taker)
    between = _relation(program, unit_of, order, waits=())
    return Units(between, unit_of, kinds, taker_of_kind, reasons)


def waiting_for_symbols(program: Program, units: Units) -> Units:
    """The same units where each waits for every symbol that the shapes it reads mention, as regions do at borders."""
    waits = list(_waits_for_symbols(program))
    order = order_of_units(program, units.unit_of, list(placeable(program)), waits=waits)
    return replace(units, relation=_relation(program, units.unit_of, order, waits=waits))


def _units(program: Program, numbers: Sequence[int], together: Together | None) -> tuple[list[int], list[int]]:
    """The unit of each node, items beside what makes their container, and the units in an order that can run."""
    unit_of = [NO_UNIT] * len(program.index)
    for number in numbers:
        unit_of[number] = number
    if together is not None:
        group_nodes(program, unit_of, numbers, together)
    index = program.index
    for number in program.projections:
        unit_of[number] = unit_of[index.sources[index.starts[number]]]
    return unit_of, list(numbers) if together is None else order_of_units(program, unit_of, numbers)


def _grouped(
    numbers: Sequence[int], unit_of: Sequence[int], *, is_grouped: bool
) -> Iterable[tuple[int, Sequence[int]]]:
    """Each unit with its nodes; items of containers are asked of nobody."""
    if not is_grouped:
        return ((number, (number,)) for number in numbers)
    members: dict[int, list[int]] = {}
    for number in numbers:
        members.setdefault(unit_of[number], []).append(number)
    return members.items()


def _reasons(nodes: Sequence[Node], refusal: Refusal) -> dict[Node, str]:
    """The reason of the node that is refused, and of those that stay together with it."""
    text = f"it stays together with {refusal.node.name!r}, which is {refusal.reason}"
    other = Reason(text, kind="together", by=refusal.node.name)
    return {node: refusal.reason if node is refusal.node else other for node in nodes}


def _relation(
    program: Program, unit_of: Sequence[int], order: Sequence[int], *, waits: Iterable[tuple[int, int]]
) -> Relation:
    items = frozenset(program.projections)
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    return relation(unit_of, order, data=program.index.edges(), effects=chain(effects, waits))


def _waits_for_symbols(program: Program) -> Iterator[tuple[int, int]]:
    """What gives a symbol, with each node that reads a value which mentions it."""
    items, symbols = frozenset(program.projections), Symbols(program.index)
    for source, target in program.index.edges():
        for place, _ in symbols.sources(source):
            if not isinstance(place, Dimension) and place != target and target not in items:
                yield place, target


# Capabilities: who takes a node, asked of a function, of torch's `OperatorSupport`, or of a backend.


@runtime_checkable
class Supports(Protocol):
    """What torch calls an operator support."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool: ...


#: Who takes nodes: a function from a node to why it is refused (None if it is not), an operator support of torch's, a
#: backend, or the name of one.
Capability: TypeAlias = Callable[[Node], str | None] | Supports | Backend | str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that nobody takes, and why."""

    node: Node
    reason: Reason


def checked_capabilities(given: object) -> tuple[Capability, ...]:
    """One capability or several as a tuple, each of which can be asked."""
    several = given if isinstance(given, tuple | list) else (given,)
    if not several:
        raise OptionError("ByCapability asks at least one backend, function or OperatorSupport")
    for one in several:
        if isinstance(one, str):
            find_backend(one)
        elif isinstance(one, type) or not (is_backend(one) or isinstance(one, Supports) or callable(one)):
            raise OptionError(
                f"{one!r} cannot say what it takes; give a function from a node to a reason to refuse it (or None), "
                "an OperatorSupport, or a backend"
            )
    return tuple(several)


@final
class Takers:
    """Capabilities in order of preference, asked about the nodes of one program."""

    def __init__(self, program: Program, capabilities: Sequence[Capability]) -> None:
        submodules = dict(program.graph_module.named_modules(remove_duplicate=False))
        self._takers = [_Taker.of(one, submodules) for one in capabilities]

    def taker_of(self, nodes: Sequence[Node]) -> int | Refusal:
        """The place of the first that takes all of the nodes, or the first node that all refuse one of, and why."""
        refusals: list[tuple[str, str]] = []
        refused: Node | None = None
        for place, taker in enumerate(self._takers):
            for node in nodes:
                why = taker.refusal(node)
                if why is not None:
                    refused = refused or node
                    refusals.append((taker.name, why))
                    break
            else:
                return place
        assert refused is not None
        return Refusal(refused, _joined(refusals))


def _joined(refusals: Sequence[tuple[str, str]]) -> Reason:
    if len(refusals) == 1:
        return Reason.refused(*refusals[0])
    by = " and ".join(name for name, _ in refusals)
    why = "; ".join(f"{name}: {why}" for name, why in refusals)
    return Reason(f"refused by {why}", kind="refused", by=by, why=why)


@dataclass(frozen=True, slots=True)
class _Taker:
    """A capability with its name, asked with errors that name the node."""

    name: str
    function: Callable[[Node], Any]

    @classmethod
    def of(cls, capability: Capability, submodules: Mapping[str, nn.Module]) -> _Taker:
        if isinstance(capability, str) or is_backend(capability):
            backend = find_backend(capability)
            return cls(backend.name, backend.refusal)
        if isinstance(capability, Supports):
            support = capability
            return cls(type(support).__name__, lambda node: _not_supported(support, submodules, node))
        assert callable(capability)
        name = getattr(capability, "__name__", None) or type(capability).__name__
        return cls("taken" if name == "<lambda>" else name, capability)

    def refusal(self, node: Node) -> str | None:
        answer = asked(self.function, node, node=node, role=f"refusal function {self.name!r}")
        if answer is not None and not isinstance(answer, str):
            raise CallbackError(
                f"the refusal function {self.name!r} answered {answer!r} for node {node.name!r}; it answers with the "
                "reason to refuse the node, a text, or with None to take it"
            )
        return answer if answer is None or answer.strip() else NO_REASON


def _not_supported(support: Supports, submodules: Mapping[str, nn.Module], node: Node) -> str | None:
    return None if support.is_node_supported(submodules, node) else "not supported"


def name_of(capability: Capability) -> str:
    """What regions and reasons call whoever takes the nodes."""
    return _Taker.of(capability, {}).name
