"""Kept together, kept apart, limits, trivial nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch.fx import Node

from partita.analysis.nodes import value_of
from partita.analysis.op_effects.calls import CallEffects
from partita.analysis.projections import is_projection
from partita.errors import CallbackError, CycleError, OptionError
from partita.policies.legalize import NO_REASON, asked, asked_label
from partita.program.operator_choice import plain_name
from partita.program.program import Program
from partita.regions import Region
from partita.solvers.quotient import ALONE, NOWHERE, quotient

__all__ = [
    "Apart",
    "IdleNodes",
    "KeptApart",
    "RegionLimits",
    "Together",
    "Worthwhile",
    "checked_together",
    "group_nodes",
    "order_of_units",
    "worthwhile_nodes",
]


# Idle nodes: those that compute nothing worth a call, since they only view, measure, allocate or assert.


@final
class IdleNodes:
    """Which nodes of a program are idle: views, sizes, arithmetic on sizes, items, constants and assertions."""

    def __init__(self, program: Program) -> None:
        self._root = program.graph_module
        self._known: dict[Node, bool] = {}
        self._written: dict[Node, bool] = {}
        self._behaviours = CallEffects(program.graph_module, program.pure)

    def __contains__(self, node: Node) -> bool:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self._is_idle(node)
        return known

    def _is_idle(self, node: Node) -> bool:
        if node.op == "call_module":
            return False
        if node.target is getattr or is_projection(node, self._root, self._written):
            return True
        if node.target is operator.getitem:
            return _is_basic_index(node.args[1])
        package = "torch" if node.op == "call_method" else _package(node.target)
        name = plain_name(node)
        if package not in _ARITHMETIC or name in _READS_DATA:
            return False
        if isinstance(value_of(node), _NUMBERS):
            return True
        return package == "torch" and (name in _SIZES_AND_VIEWS or name.startswith(_CHECKS) or self._is_constant(node))

    def _is_constant(self, node: Node) -> bool:
        """Whether it makes a tensor out of nothing but numbers."""
        if node.op == "call_method" or any(not isinstance(value_of(read), _NUMBERS) for read in node.all_input_nodes):
            return False
        return not self._behaviours.of(node).acts


def _package(target: Any) -> str:
    return str(getattr(target, "__module__", "")).partition(".")[0]


def _is_basic_index(index: Any) -> bool:
    """Whether indexing by `index` gives a view, not a gathered copy."""
    places = index if isinstance(index, tuple) else (index,)
    return all(place is None or place is Ellipsis or isinstance(place, slice | int) for place in places)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
_ARITHMETIC = frozenset(("torch", "_operator", "builtins", "math"))
_READS_DATA = frozenset(("_local_scalar_dense", "item", "tolist"))
_CHECKS = ("_assert", "_log_api_usage", "sym_constrain")
_SIZE_NAMES = """
    dim element_size ndimension nelement numel size storage_offset stride sym_numel sym_size sym_storage_offset
    sym_stride
"""
_VIEW_NAMES = """
    _reshape_alias _unsafe_view adjoint alias as_strided broadcast_to chunk contiguous detach diagonal dsplit expand
    expand_as flatten hsplit imag lift_fresh moveaxis movedim narrow permute ravel real reshape reshape_as select slice
    split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk
    unsafe_split unsqueeze view view_as view_as_complex view_as_real vsplit
"""
_SIZES_AND_VIEWS = frozenset((_SIZE_NAMES + _VIEW_NAMES).split())


# What is kept apart: nodes of different modes, devices or labels, which never share a region.


#: A function by whose answers nodes are kept apart.
Apart: TypeAlias = Callable[[Node], Hashable]


@final
class KeptApart:
    """By what the regions of a program are kept apart."""

    def __init__(self, program: Program, *, modes: bool, devices: bool, label: Apart | None) -> None:
        self._nodes = program.index.nodes
        self._traits: list[_Trait] = []
        if modes:
            self._traits.append(_Trait("mode", "modes_apart=False", program.modes.at))
        if devices:
            self._traits.append(_Trait("device", "devices_apart=False", partial(_device, program)))
        if label is not None:
            self._traits.append(_Trait("answer of `apart`", "other answers", partial(_label, program, label)))

    def shared_by(self, numbers: Sequence[int]) -> Hashable:
        """What the nodes of a unit have in common and share with their region; raises where they differ."""
        if len(numbers) == 1:
            return tuple([trait.of(numbers[0]) for trait in self._traits])
        return tuple([self._only(trait, numbers) for trait in self._traits])

    def _only(self, trait: _Trait, numbers: Sequence[int]) -> Hashable:
        """The one value that is found; None, where nothing is known of a node, goes with any."""
        found: dict[Hashable, int] = {}
        for number in numbers:
            value = trait.of(number)
            if value is not None:
                found.setdefault(value, number)
        if len(found) <= 1:
            return next(iter(found), None)
        (one, first), (other, second) = list(found.items())[:2]
        raise OptionError(
            f"`together` puts {self._nodes[first].name!r} ({one}) and {self._nodes[second].name!r} ({other}) into one "
            f"group, but a region holds one {trait.name}; make a group of each, or give {trait.remedy}"
        )


class _Trait(NamedTuple):
    """Something that a region has one of, what to give so that it may have several, and how a node's is found."""

    name: str
    remedy: str
    of: Callable[[int], Hashable]


def _label(program: Program, label: Apart, number: int) -> Hashable:
    return asked_label(label, program.index.nodes[number], role="`apart`")


def _device(program: Program, number: int) -> str | None:
    """The device that a node computes on: that of its value, or else of the first tensor that it reads."""
    index = program.index
    for candidate in (number, *index.inputs(number)):
        value = value_of(index.nodes[candidate])
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                return str(item.device)
    return None


# Limits on regions: connected ones, not too small, not too large, worthwhile.


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What a region must be like."""

    connected: bool = False
    smallest: int = 1
    smallest_flops: int = 0
    largest: int | None = None
    worthwhile: Worthwhile | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.connected, bool):
            raise OptionError(f"connected is True or False, not {self.connected!r}")
        for name, least in (("smallest", 1), ("smallest_flops", 0), ("largest", 1)):
            value = getattr(self, name)
            if (type(value) is not int or value < least) and not (name == "largest" and value is None):
                raise OptionError(f"{name} is a number from {least} on, not {value!r}")
        if self.largest is not None and self.largest < self.smallest:
            raise OptionError(f"no region has at least {self.smallest} and at most {self.largest} operators")
        if self.worthwhile is not None and not callable(self.worthwhile):
            raise OptionError(f"`worthwhile` is a function of a region, not {self.worthwhile!r}")

    def allow_anything(self) -> bool:
        """Whether no region can be cut or left out."""
        return self.largest is None and self.worthwhile is None and self.smallest == 1 and not self.smallest_flops


# Together: groups of nodes that a policy moves as one, and an order in which what is grouped can run.


#: Nodes that stay together: a function that gives them the same label (None: no group), or groups of node names.
Together = Callable[[Node], Hashable | None] | Iterable[Iterable[str]]


def checked_together(given: object) -> Together | None:
    """What stays together, as a function or as groups of names that can be read again and again."""
    if given is None or callable(given):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OptionError(f"`together` takes groups of names, or a function from a node to a label, not {given!r}")
    groups = tuple(names if isinstance(names, str) or not isinstance(names, Iterable) else (*names,) for names in given)
    for names in groups:
        if not isinstance(names, tuple):
            raise OptionError(f"`together` takes groups of names, not {names!r}: give together=[[{names!r}, ...]]")
        for name in names:
            if not isinstance(name, str):
                raise OptionError(f"`together` takes names of nodes, which are text, not {name!r}")
    return groups


def group_nodes(program: Program, unit_of: list[int], numbers: Sequence[int], together: Together) -> None:
    """Puts those of the nodes `numbers` that are in one group into the unit of the first of them."""
    label_of, nodes = _labels(program, numbers, together), program.index.nodes
    first: dict[Hashable, int] = {}
    for number in numbers:
        label = asked_label(label_of, nodes[number], role="`together`")
        if label is not None:
            unit_of[number] = first.setdefault(label, number)


def order_of_units(
    program: Program, unit_of: Sequence[int], numbers: Sequence[int], *, waits: Iterable[tuple[int, int]] = ()
) -> list[int]:
    """The units of the nodes `numbers` in an order that data, effects and `waits` allow."""
    units = list(dict.fromkeys(unit_of[number] for number in numbers if unit_of[number] != number))
    groups = {unit: place for place, unit in enumerate(units)}
    owner = [groups.get(unit, ALONE) if unit >= 0 else NOWHERE for unit in unit_of]
    edges = (*program.index.edges(), *program.effects.edges(), *waits)
    order = quotient(owner, len(groups), edges).stable_order()
    if order is None:
        names = ", ".join(repr(program.index.nodes[unit].name) for unit in units)
        raise CycleError(
            f"the groups that begin at {names} need each other, or something that runs between their nodes; take it "
            "into the group, or make the groups smaller"
        )
    ordered = (units[vertex] if vertex < len(units) else vertex - len(units) for vertex in order)
    return [unit for unit in ordered if unit_of[unit] == unit]


def _labels(program: Program, numbers: Sequence[int], together: Together) -> Callable[[Node], Hashable | None]:
    if callable(together):
        return together
    can_be_placed = {program.index.nodes[number] for number in numbers}
    groups: dict[Node, int] = {}
    for place, names in enumerate(together):
        for name in names:
            node = program.node(name)
            while program.index.number[node] in program.projecting:
                node = node.all_input_nodes[0]
            if node not in can_be_placed:
                raise OptionError(f"`together` names {name!r}, which no region can hold: {_what(node)}; leave it out")
            if groups.setdefault(node, place) != place:
                raise OptionError(f"`together` names {name!r} in two groups; merge them")
    return groups.get


def _what(node: Node) -> str:
    if node.op in _NO_OPERATORS:
        return _NO_OPERATORS[node.op]
    return "it only switches a mode, or checks the inputs of the program"


_NO_OPERATORS = {
    "placeholder": "it is an input of the program",
    "output": "it is the output of the program",
    "get_attr": "it reads an attribute, which is passed in",
}


# Worthwhile: asking a user's function whether a region is worth its call, or which nodes of it are.


#: Whether a region is worth its call: True or False, a text with the reason to leave it out, or the nodes to keep.
Worthwhile: TypeAlias = Callable[[Region], bool | str | Collection[Node]]


def worthwhile_nodes(worthwhile: Worthwhile, region: Region) -> tuple[frozenset[Node], str]:
    """The nodes of a region that are worthwhile, and why the others are not."""
    answer: object = asked(worthwhile, region, node=region.nodes[0], role="`worthwhile`")
    if answer is True:
        return frozenset(region.nodes), ""
    if answer is False:
        return frozenset(), "`worthwhile` says no"
    if isinstance(answer, str):
        return frozenset(), answer if answer.strip() else NO_REASON
    if isinstance(answer, Collection) and all(isinstance(node, Node) for node in answer):
        inside = frozenset(region.nodes)
        stray = next((node.name for node in answer if node not in inside), None)
        if stray is not None:
            raise CallbackError(f"`worthwhile` keeps {stray!r}, which is not in region {region.name!r}")
        return frozenset(answer), "`worthwhile` keeps other nodes of it"
    raise CallbackError(
        f"`worthwhile` answered {answer!r} for region {region.name!r}; it answers True, False, a reason, or the nodes "
        "to keep"
    )
