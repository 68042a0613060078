"""Capabilities, which accept or refuse nodes, and the units that `ByCapability` assigns as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import nn
from torch.fx import Node

from partita._torch.functorch import transforms_found_once
from partita.analysis.symbols import Dimension, Symbols
from partita.backends.backend import Backend, find_backend, is_backend
from partita.errors import CallbackError, OptionError
from partita.policies.constraints import Apart, KeptApart, Together, group_nodes, order_of_units
from partita.policies.legalize import NO_REASON, assignable, call_user_function
from partita.program.program import Program
from partita.regions.region import Reason
from partita.solvers.relation import NO_UNIT, REFUSED, Relation, relation


@runtime_checkable
class Supports(Protocol):
    """An operator support of torch."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool: ...


#: A function from a node to the reason to refuse it (None to accept it), an operator support of torch, a backend, or
#: the name of one.
Capability: TypeAlias = Callable[[Node], str | None] | Supports | Backend | str


@dataclass(frozen=True, slots=True)
class Units:
    """The unit of each node, and the kind of each unit: one for each capability and all that is kept apart."""

    relation: Relation
    unit_of: Sequence[int]
    kinds: list[int]
    #: For each kind the capability, by its position in the order of preference, and what the units have in common.
    kind_keys: list[tuple[int, Hashable]]
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
    """The units of a program; capabilities are queried once for each operator."""
    numbers = list(assignable(program))
    unit_of, order = _units(program, numbers, together)
    submodules = dict(program.graph_module.named_modules(remove_duplicate=False))
    checks, nodes = [Check.of(one, submodules) for one in capabilities], program.index.nodes
    kept_apart = KeptApart(program, modes=modes_apart, devices=devices_apart, label=apart)
    kinds, reasons = [REFUSED] * len(unit_of), dict[Node, str]()
    known: dict[tuple[int, Hashable], int] = {}
    with transforms_found_once(program.graph):
        for unit, members in _grouped(numbers, unit_of, is_grouped=together is not None):
            held = [nodes[number] for number in members]
            accepting = _first_accepting(checks, held)
            if isinstance(accepting, _Refusal):
                reasons.update(_reasons(held, accepting))
                continue
            kinds[unit] = known.setdefault((accepting, kept_apart.shared_by(members)), len(known))
    between = _relation(program, unit_of, order, waits=())
    return Units(between, unit_of, kinds, list(known), reasons)


def waiting_for_symbols(program: Program, units: Units) -> Units:
    """The same units, where each also waits for the symbols in the shapes of its inputs, as regions do."""
    waits = list(_waits_for_symbols(program))
    order = order_of_units(program, units.unit_of, list(assignable(program)), waits=waits)
    return replace(units, relation=_relation(program, units.unit_of, order, waits=waits))


def checked_capabilities(option: object) -> tuple[Capability, ...]:
    """One capability or several as a tuple of valid ones."""
    several = option if isinstance(option, tuple | list) else (option,)
    if not several:
        raise OptionError("ByCapability needs at least one backend, function or OperatorSupport")
    for one in several:
        if isinstance(one, str):
            find_backend(one)
        elif isinstance(one, type) or not (is_backend(one) or isinstance(one, Supports) or callable(one)):
            raise OptionError(
                f"{one!r} is no capability; pass a function from a node to a reason to refuse it (or None), an "
                "OperatorSupport, or a backend"
            )
    return tuple(several)


def name_of(capability: Capability) -> str:
    """The name of a capability in regions and reasons."""
    return Check.of(capability, {}).name


def _units(program: Program, numbers: Sequence[int], together: Together | None) -> tuple[list[int], list[int]]:
    """The unit of each node, items with what makes their container, and the units in an order that can run."""
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
    """Each unit with its nodes, without items of containers."""
    if not is_grouped:
        return ((number, (number,)) for number in numbers)
    members: dict[int, list[int]] = {}
    for number in numbers:
        members.setdefault(unit_of[number], []).append(number)
    return members.items()


def _reasons(nodes: Sequence[Node], refusal: _Refusal) -> dict[Node, str]:
    """The reason of the refused node, and of those that stay together with it."""
    text = f"it stays together with {refusal.node.name!r}, which is {refusal.reason}"
    other = Reason(text, kind="together", by=refusal.node.name)
    return {node: refusal.reason if node is refusal.node else other for node in nodes}


def _relation(
    program: Program, unit_of: Sequence[int], order: Sequence[int], *, waits: Iterable[tuple[int, int]]
) -> Relation:
    items = program.projections
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    return relation(unit_of, order, data=program.index.edges(), effects=chain(effects, waits))


def _waits_for_symbols(program: Program) -> Iterator[tuple[int, int]]:
    """Pairs of the node that defines a symbol and a node that reads a value whose shape has the symbol."""
    symbols = Symbols(program.index)
    for source, target in program.index.edges():
        for definition, _ in symbols.sources(source):
            if not isinstance(definition, Dimension) and definition != target and target not in program.projections:
                yield definition, target


class _Refusal(NamedTuple):
    """A node that no capability accepts, and why."""

    node: Node
    reason: Reason


def _first_accepting(checks: Sequence[Check], nodes: Sequence[Node]) -> int | _Refusal:
    """The position of the first capability that accepts all of the nodes, or the first refused node and why."""
    refusals: list[tuple[str, str]] = []
    refused: Node | None = None
    for position, check in enumerate(checks):
        for node in nodes:
            why = check.refusal(node)
            if why is not None:
                refused = refused or node
                refusals.append((check.name, why))
                break
        else:
            return position
    assert refused is not None
    return _Refusal(refused, _joined(refusals))


def _joined(refusals: Sequence[tuple[str, str]]) -> Reason:
    if len(refusals) == 1:
        return Reason.refused(*refusals[0])
    by = " and ".join(name for name, _ in refusals)
    why = "; ".join(f"{name}: {why}" for name, why in refusals)
    return Reason(f"refused by {why}", kind="refused", by=by, why=why)


@dataclass(frozen=True, slots=True)
class Check:
    """A capability as a function with a name; its errors name the node."""

    name: str
    function: Callable[[Node], Any]

    @classmethod
    def of(cls, capability: Capability, submodules: Mapping[str, nn.Module]) -> Check:
        if isinstance(capability, str) or is_backend(capability):
            backend = find_backend(capability)
            return cls(backend.name, backend.refusal)
        if isinstance(capability, Supports):
            support = capability
            return cls(
                type(support).__name__,
                lambda node: None if support.is_node_supported(submodules, node) else "not supported",
            )
        assert callable(capability)
        name = getattr(capability, "__name__", None) or type(capability).__name__
        return cls("capability" if name == "<lambda>" else name, capability)

    def refusal(self, node: Node) -> str | None:
        reason = call_user_function(self.function, node, node=node, role=f"refusal function {self.name!r}")
        if reason is not None and not isinstance(reason, str):
            raise CallbackError(
                f"the refusal function {self.name!r} returned {reason!r} for node {node.name!r}; return the reason to "
                "refuse the node, a string, or None to accept it"
            )
        return reason if reason is None or reason.strip() else NO_REASON
