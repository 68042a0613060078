"""Why regions with the same operators have different bodies: the first difference, in words."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.fx.graph_writer import map_nodes
from partita._torch.operator_schemas import signatures_of, signatures_of_method
from partita.analysis.nodes import find, value_of, value_text
from partita.program.structure import structure_of
from partita.regions.borders import Item
from partita.regions.equal_bodies import local_mentions, mutated_later
from partita.regions.partition import Partition

#: So much is shown of a constant.
_LONGEST = 60


def differences(partition: Partition, regions: Sequence[int]) -> list[tuple[int, str] | None]:
    """For each of these regions, whose bodies differ, the first one with the same operators, and what differs.

    Regions are numbers, in the order of the partition. None for a region that is the first one itself.
    """
    bodies, first = _Bodies(partition), dict[Hashable, int]()
    found: list[tuple[int, str] | None] = []
    for region in regions:
        known = first.setdefault(bodies.operators(region), region)
        found.append(None if known == region else (known, bodies.difference(region, known)))
    return found


@final
class _Bodies:
    """The bodies of a partition, of which two are compared."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._held = partition, partition.numbers()
        self._program, self._structure = partition.program, partition.program.once(structure_of)
        self._nodes = partition.program.index.nodes

    def operators(self, region: int) -> Hashable:
        """What a region calls, in order; called modules count as one."""
        nodes = (self._nodes[number] for number in self._held[region])
        return tuple((node.op, None if node.op == "call_module" else node.target) for node in nodes)

    def difference(self, region: int, known: int) -> str:
        """The first difference between two regions with the same operators."""
        letters, loose, passed = self._structure.letters, self._structure.loose, self._partition.constants
        local, other_local = dict[int, int](), dict[int, int]()
        ours, theirs = self._held[region], self._held[known]
        wiring = local_mentions(self._structure, ours, local)
        other_wiring = local_mentions(self._structure, theirs, other_local)
        for number, other, read, other_read in zip(ours, theirs, wiring, other_wiring, strict=True):
            known_letters: Mapping[int, int] | Sequence[int] = loose if {number, other} <= passed.keys() else letters
            if known_letters[number] != known_letters[other]:
                return self._of_calls(number, other)
            if read != other_read:
                return self._of_wiring(number, other, read, other_read)
        return self._of_borders(region, known)

    def _of_calls(self, number: int, other: int) -> str:
        """What differs between two calls of one operator."""
        node, known, modes = self._nodes[number], self._nodes[other], self._program.modes
        if _order_of_inputs(node) != _order_of_inputs(known):
            return _another_order(node, known)
        for read, other_read in zip(node.all_input_nodes, known.all_input_nodes, strict=True):
            if shown := self._kinds(read, other_read):
                return f"{node.name} reads {shown[0]}, {known.name} {shown[1]}"
        own, others = dict(_constants(node)), dict(_constants(known))
        for name in {**own, **others}:
            if shown := _different(own.get(name, "by default"), others.get(name, "by default")):
                return f"{name} of {node.name} is {shown[0]}, of {known.name} {shown[1]}"
        if shown := _different(str(modes.at(number)), str(modes.at(other))):
            return f"{node.name} runs under {shown[0]}, {known.name} under {shown[1]}"
        if shown := self._kinds(node, known):
            return f"{node.name} returns {shown[0]}, {known.name} {shown[1]}"
        return f"{node.name} and {known.name} call functions or modules with other settings, or have other marks"

    def _of_wiring(self, number: int, other: int, read: Sequence[int], other_read: Sequence[int]) -> str:
        """What differs where equal calls read other values of their regions; `read` numbers these values."""
        node, known = self._nodes[number], self._nodes[other]
        inputs = len(node.all_input_nodes)
        if read[:inputs] != other_read[:inputs]:
            return _another_order(node, known)
        mentioned = {*self._structure.mentions[number][inputs:], *self._structure.mentions[other][inputs:]}
        what = "sizes or memory" if mentioned & self._structure.symbols else "memory"
        return f"inputs of {node.name} and {known.name} share {what} with other inputs in one of the two alone"

    def _kinds(self, node: Node, known: Node) -> tuple[str, str] | None:
        """The kinds of two values, where they differ; strides only where the rest is the same."""
        values = [self._value(one) for one in (node, known)]
        one, other = map(value_text, values)
        if one == other:
            one, other = (f"{value_text(value)}{_strides(value)}" for value in values)
        return _different(one, other)

    def _value(self, node: Node) -> object:
        value: object = value_of(node)
        return find(self._program.graph_module, str(node.target)) if node.op == "get_attr" else value

    def _of_borders(self, region: int, known: int) -> str:
        """What differs between regions whose nodes are equal."""
        for places, what in ((self._returned, "is read outside of its region"), (self._mutated, "is mutated later")):
            own, others = places(region), places(known)
            for place, item in sorted(own ^ others):
                names = [self._nodes[self._held[at][place]].name for at in (region, known)]
                one, other = names if (place, item) in own else reversed(names)
                which = "" if item < 0 else f"item {item} of "
                return f"{which}{one} {what}, {which}{other} is not"
        return "other nodes mutate their inputs later, or their inputs have another order"

    def _returned(self, region: int) -> set[tuple[int, int]]:
        outputs = self._partition.borders.of_regions[region].outputs
        return self._places(region, (one if isinstance(one, Item) else Item(one, -1) for one in outputs))

    def _mutated(self, region: int) -> set[tuple[int, int]]:
        numbers = mutated_later(self._program, self._partition.regions[region])
        return self._places(region, (Item(number, -1) for number in numbers))

    def _places(self, region: int, values: Iterable[Item]) -> set[tuple[int, int]]:
        """Where in a region the nodes are that make these values, and which item each is; without nodes outside."""
        place = {number: at for at, number in enumerate(self._held[region])}
        return {(place[value.number], value.place) for value in values if value.number in place}


def _another_order(node: Node, known: Node) -> str:
    return f"{node.name} and {known.name} read values in another order, or one twice"


def _order_of_inputs(node: Node) -> list[int]:
    """Which of its inputs a call has at each place among its arguments."""
    order: list[int] = []
    place = {read: at for at, read in enumerate(node.all_input_nodes)}
    map_nodes((node.args, node.kwargs), lambda read: order.append(place[read]))
    return order


def _different(one: str, other: str) -> tuple[str, str] | None:
    """Two texts, shortened, if they differ."""
    return None if one == other else (_shortened(one), _shortened(other))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _strides(value: object) -> str:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return ""
    return f" with strides ({', '.join(map(str, value.stride()))})"


def _constants(node: Node) -> Iterator[tuple[str, str]]:
    """The arguments of a call by name, as texts in which all inputs are alike."""
    names = _argument_names(node)
    for place, argument in enumerate(node.args):
        yield names.get(place, f"argument {place + 1}"), repr(map_nodes(argument, lambda _: ...))
    for name, argument in node.kwargs.items():
        yield name, repr(map_nodes(argument, lambda _: ...))


def _argument_names(node: Node) -> Mapping[int, str]:
    """The names of positional arguments, where torch has one schema for the call."""
    by_method = node.op == "call_method"
    signatures = signatures_of_method(str(node.target)) if by_method else signatures_of(node.target)
    known = signatures[0].arguments if len(signatures) == 1 else ()
    return {argument.position: argument.name for argument in known}
