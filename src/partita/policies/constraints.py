"""Constraints on regions: atomic groups, what is kept apart, profitability; and which nodes are trivial."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch.fx import Node

from partita.analysis.modes import AMBIENT
from partita.analysis.nodes import value_of
from partita.analysis.projections import is_projection
from partita.errors import CallbackError, CycleError, OptionError
from partita.policies.legalize import NO_REASON, call_user_function, user_label
from partita.program.operator_choice import plain_name
from partita.program.program import Program
from partita.regions import Region
from partita.solvers.quotient import ALONE, NOWHERE, quotient

#: A function of a node; nodes with different results never share a region.
Apart: TypeAlias = Callable[[Node], Hashable]

#: Atomic groups of nodes: a function that returns one label for all of a group (None: no group), or node names.
Together = Callable[[Node], Hashable | None] | Iterable[Iterable[str]]

#: Whether a region is worth its call: True or False, the reason to exclude it, or the nodes to keep.
Worthwhile: TypeAlias = Callable[[Region], bool | str | Collection[Node]]

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
_NO_OPERATORS = {
    "placeholder": "it is an input of the program",
    "output": "it is the output of the program",
    "get_attr": "it reads an attribute, which is passed in",
}


def check_flags(options: object, *names: str) -> None:
    """Raises where one of the named options is neither True nor False."""
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise OptionError(f"{name} is True or False, not {getattr(options, name)!r}")


def checked_together(option: object) -> Together | None:
    """The option `together`, with iterators of names as tuples."""
    if option is None or callable(option):
        return option
    if isinstance(option, str) or not isinstance(option, Iterable):
        raise OptionError(f"`together` takes groups of names, or a function from a node to a label, not {option!r}")
    groups = tuple(
        names if isinstance(names, str) or not isinstance(names, Iterable) else (*names,) for names in option
    )
    for names in groups:
        if not isinstance(names, tuple):
            raise OptionError(f"`together` takes groups of names, not {names!r}: pass together=[[{names!r}, ...]]")
        for name in names:
            if not isinstance(name, str):
                raise OptionError(f"`together` takes names of nodes, which are strings, not {name!r}")
    return groups


def group_nodes(program: Program, unit_of: list[int], numbers: Sequence[int], together: Together) -> None:
    """Makes each group of the nodes `numbers` one unit, numbered by the first of them."""
    label_of, nodes = _labels(program, numbers, together), program.index.nodes
    first: dict[Hashable, int] = {}
    for number in numbers:
        label = user_label(label_of, nodes[number], role="`together`")
        if label is not None:
            unit_of[number] = first.setdefault(label, number)


def order_of_units(
    program: Program, unit_of: Sequence[int], numbers: Sequence[int], *, waits: Iterable[tuple[int, int]] = ()
) -> list[int]:
    """The units of the nodes `numbers` in an order that data, effects and `waits` allow."""
    units = list(dict.fromkeys(unit_of[number] for number in numbers if unit_of[number] != number))
    groups = {unit: at for at, unit in enumerate(units)}
    owner = [groups.get(unit, ALONE) if unit >= 0 else NOWHERE for unit in unit_of]
    edges = (*program.index.edges(), *program.effects.edges(), *waits)
    order = quotient(owner, len(groups), edges).stable_order()
    if order is None:
        names = ", ".join(repr(program.index.nodes[unit].name) for unit in units)
        raise CycleError(
            f"the groups that begin at {names} need each other, or something that runs between their nodes; add that "
            "to the group, or make the groups smaller"
        )
    ordered = (units[vertex] if vertex < len(units) else vertex - len(units) for vertex in order)
    return [unit for unit in ordered if unit_of[unit] == unit]


def worthwhile_nodes(worthwhile: Worthwhile, region: Region) -> tuple[frozenset[Node], str]:
    """The nodes of a region that are worthwhile, and why the others are not."""
    result: object = call_user_function(worthwhile, region, node=region.nodes[0], role="`worthwhile`")
    if result is True:
        return frozenset(region.nodes), ""
    if result is False:
        return frozenset(), "`worthwhile` is False"
    if isinstance(result, str):
        return frozenset(), result if result.strip() else NO_REASON
    if isinstance(result, Collection) and all(isinstance(node, Node) for node in result):
        inside = frozenset(region.nodes)
        stray = next((node.name for node in result if node not in inside), None)
        if stray is not None:
            raise CallbackError(f"`worthwhile` keeps {stray!r}, which is not in region {region.name!r}")
        return frozenset(result), "`worthwhile` keeps other nodes of it"
    raise CallbackError(
        f"`worthwhile` returned {result!r} for region {region.name!r}; return a bool, a reason, or the nodes to keep"
    )


@final
class KeptApart:
    """The traits of which a region holds one: mode, device, and the result of the user's `apart`."""

    def __init__(self, program: Program, *, modes: bool, devices: bool, label: Apart | None) -> None:
        self._nodes = program.index.nodes
        self._traits: list[_Trait] = []
        if modes:
            self._traits.append(_Trait("mode", "modes_apart=False", program.modes.at))
        if devices:
            self._traits.append(_Trait("device", "devices_apart=False", partial(_device, program)))
        if label is not None:
            of = partial(user_label, label, role="`apart`")
            remedy = "one result for all of the group"
            self._traits.append(_Trait("result of `apart`", remedy, lambda number: of(self._nodes[number])))

    def shared_by(self, numbers: Sequence[int]) -> Hashable:
        """The traits of the nodes of a unit; raises where they differ."""
        if len(numbers) == 1:
            return tuple([trait.of(numbers[0]) for trait in self._traits])
        return tuple([self._only(trait, numbers) for trait in self._traits])

    def _only(self, trait: _Trait, numbers: Sequence[int]) -> Hashable:
        """The one value of the trait; None, where nothing is known of a node, goes with any."""
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
            f"group, but a region holds one {trait.name}; make a group of each, or use {trait.remedy}"
        )


def check_modes_apart(policy: object) -> None:
    """Raises where the option `modes_apart` is neither True nor False nor None."""
    value = getattr(policy, "modes_apart", None)
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"modes_apart is True, False, or None for what the treatment needs, not {value!r}")


def at_mode_changes(program: Program, assignment: Sequence[int]) -> list[int]:
    """The assignment, whose numbers rise in graph order, with another number from each change of the mode on."""
    cut, at, last = list(assignment), -1, (-1, AMBIENT)
    for number, part in enumerate(assignment):
        if part >= 0 and number not in program.symbolic_scalars:
            here = (part, program.modes.at(number))
            at += here != last
            last = here
        if part >= 0:
            cut[number] = max(at, 0)
    return cut


@final
class TrivialNodes:
    """Nodes that compute nothing worth a call: views, sizes, arithmetic on sizes, items, constants and assertions."""

    def __init__(self, program: Program) -> None:
        self._root = program.graph_module
        self._known: dict[Node, bool] = {}
        self._mutated: dict[Node, bool] = {}
        self._calls = program.calls

    def __contains__(self, node: Node) -> bool:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self._is_trivial(node)
        return known

    def _is_trivial(self, node: Node) -> bool:
        if node.op == "call_module":
            return False
        if node.target is getattr or is_projection(node, self._root, self._mutated):
            return True
        if node.target is operator.getitem:
            return _is_basic_index(node.args[1])
        module = "torch" if node.op == "call_method" else str(getattr(node.target, "__module__", ""))
        package, name = module.partition(".")[0], plain_name(node)
        if package not in _ARITHMETIC or name in _READS_DATA:
            return False
        if isinstance(value_of(node), _NUMBERS):
            return True
        return package == "torch" and (name in _SIZES_AND_VIEWS or name.startswith(_CHECKS) or self._is_constant(node))

    def _is_constant(self, node: Node) -> bool:
        """Whether it makes a tensor of numbers alone."""
        if node.op == "call_method" or any(not isinstance(value_of(read), _NUMBERS) for read in node.all_input_nodes):
            return False
        return not self._calls.of(node).is_effectful


def _labels(program: Program, numbers: Sequence[int], together: Together) -> Callable[[Node], Hashable | None]:
    if callable(together):
        return together
    can_be_assigned = {program.index.nodes[number] for number in numbers}
    groups: dict[Node, int] = {}
    for at, names in enumerate(together):
        for name in names:
            node = program.node(name)
            while program.index.number[node] in program.projections:
                node = node.all_input_nodes[0]
            if node not in can_be_assigned:
                what = _NO_OPERATORS.get(node.op, "it only switches a mode, or checks the inputs of the program")
                raise OptionError(f"`together` names {name!r}, which no region can hold: {what}; remove it")
            if groups.setdefault(node, at) != at:
                raise OptionError(f"`together` names {name!r} in two groups; merge them")
    return groups.get


class _Trait(NamedTuple):
    """Something that a region has one of, the option that allows several, and the trait of a node by number."""

    name: str
    remedy: str
    of: Callable[[int], Hashable]


def _device(program: Program, number: int) -> str | None:
    """The device that a node computes on: that of its value, or else of the first tensor that it reads."""
    index = program.index
    for candidate in (number, *index.inputs(number)):
        value = value_of(index.nodes[candidate])
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                return str(item.device)
    return None


def _is_basic_index(index: Any) -> bool:
    """Whether indexing by `index` gives a view, not a gathered copy."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is Ellipsis or isinstance(one, slice | int) for one in indices)
