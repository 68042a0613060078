"""The structure of a program: what each node computes and what it mentions, blind to names and to values of weights.

A letter is a number that is equal for nodes with the same operator, constants, dtypes, shapes, strides, devices, modes
and marks, on inputs of the same kind. Symbols are mentioned like inputs, so that they count up to renaming.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from partita._torch.fx.structural_hash import NodeKeys
from partita._torch.operator_schemas import storage_key
from partita._torch.symbolic_shapes import SYMBOLIC, renamed_expression
from partita._torch.tensors import inner_tensors, placements_of
from partita.analysis.modes import AMBIENT
from partita.analysis.nodes import find, value_of
from partita.analysis.number_operands import number_operand
from partita.program.program import Program

_NO_CALLS = frozenset(("placeholder", "get_attr", "output"))


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """For each node by number its letter, and what it mentions.

    Mentioned are its inputs by number; numbers from the size of the graph on are symbols, storages that several inputs
    share, called modules and groups of recomputation. Inputs, attributes and the output have letters too.
    """

    letters: Sequence[int]
    mentions: Sequence[Sequence[int]]
    #: The numbers of symbols.
    symbols: frozenset[int]
    #: For each node with a number that a tensor can replace the letter that does not depend on the number.
    loose: Mapping[int, int]


def structure_of(program: Program) -> Structure:
    """The structure, in time linear in nodes and edges; ask for it by `Program.once`."""
    return _Reader(program).structure()


class _Reader:
    """Reads one program."""

    def __init__(self, program: Program) -> None:
        self._program, self._root, self._index = program, program.graph_module, program.index
        self._keys = NodeKeys()
        self._known: dict[Hashable, int] = {}
        self._others: dict[tuple[str, Hashable], int] = {}
        self._expressions: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        self._state: dict[nn.Module, tuple[Hashable, tuple[int, ...]]] = {}

    def structure(self) -> Structure:
        index = self._index
        values = [0] * len(index)
        own: list[tuple[int, ...]] = [()] * len(index)
        for number, node in enumerate(index.nodes):
            value = self._value(node)
            if value is not None:
                described, symbols = self._described(value)
                values[number] = self._letter(described)
                own[number] = tuple([self._other("symbol", symbol) for symbol in symbols])
        shared = self._shared_storages()
        joint = self._program.joint
        backward = frozenset[Node]() if joint is None else frozenset(joint.backward)
        by_number, root = self._program.modes.by_number, self._root
        letters, mentions, loose = list(values), list[Sequence[int]](), dict[int, int]()
        for number, node in enumerate(index.nodes):
            read = index.inputs(number)
            mentioned: Sequence[int] = (*read, *own[number]) if own[number] else read
            if node.op in _NO_CALLS:
                mentions.append(mentioned)
                continue
            mode = AMBIENT if by_number is None else by_number[number]
            key: tuple[Hashable, ...] = (values[number], *[values[source] for source in read])
            if mode != AMBIENT or node in backward:
                key = (*key, mode, node in backward)
            if node.op == "call_module":
                state, tensors = self._state_of(find(root, str(node.target)))
                key, mentioned = (*key, state), (*mentioned, *tensors)
            if (operand := number_operand(node)) is not None:
                called = self._keys.of_call(node, root, without=operand.place)
                loose[number] = self._letter((called, operand.dtype, *key))
            group = node.meta.get("ac_graph_id")
            if group is not None:
                mentioned = (*mentioned, self._other("group", group))
            if shared:
                mentioned = (*mentioned, *(shared[source] for source in read if source in shared))
            letters[number] = self._letter((self._keys.of_call(node, root), *key))
            mentions.append(mentioned)
        mentioned_symbols = (number for (kind, _), number in self._others.items() if kind == "symbol")
        return Structure(letters, mentions, frozenset(len(index) + number for number in mentioned_symbols), loose)

    def _letter(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known) + 1)

    def _other(self, kind: str, key: Hashable) -> int:
        """The number of something that is mentioned beside inputs."""
        return len(self._index) + self._others.setdefault((kind, key), len(self._others))

    def _value(self, node: Node) -> object:
        """The traced value of a node, or what it reads from the module."""
        value: object = value_of(node)
        return find(self._root, str(node.target)) if node.op == "get_attr" else value

    def _described(self, value: Any) -> tuple[Hashable, tuple[Any, ...]]:
        """What kind of value it is, and the symbols in it, in order."""
        if isinstance(value, Tensor):
            return self._described_tensor(value)
        if isinstance(value, tuple | list):
            parts = list(map(self._described, value))
            symbols = tuple([symbol for _, found in parts for symbol in found])
            return (type(value).__name__, *(part for part, _ in parts)), symbols
        if isinstance(value, SYMBOLIC):
            text, symbols = renamed_expression(value, self._expressions)
            return (type(value), text), symbols
        if isinstance(value, nn.Module):
            return ("module", self._keys.of_module(value)), ()
        if isinstance(value, bool | int | float | complex | str | None):
            return (type(value), repr(value)), ()
        return (type(value),), ()

    def _described_tensor(self, value: Tensor) -> tuple[Hashable, tuple[Any, ...]]:
        if value.is_nested:
            return (value.dtype, str(value.device), value.layout, type(value)), ()
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else tuple(value.shape)
        symbols: tuple[Any, ...] = ()
        if any(type(size) is not int for size in sizes):
            shown = [self._described(size) for size in sizes]
            sizes, symbols = tuple([one for one, _ in shown]), tuple([symbol for _, found in shown for symbol in found])
        # The text of the sizes, since a file can have any number of sizes with the same hash.
        kind: Hashable = (value.dtype, str(value.device), value.layout, repr(sizes) if not symbols else sizes)
        inner = inner_tensors(value)
        if inner:
            parts = [self._described(tensor) for tensor in inner.values()]
            kind = (kind, type(value), str(placements_of(value)), *(part for part, _ in parts))
            symbols = (*symbols, *(symbol for _, found in parts for symbol in found))
        return kind, symbols

    def _state_of(self, module: Any) -> tuple[Hashable, tuple[int, ...]]:
        """What kind of tensors a called module holds, and the numbers of the module and of the tensors."""
        if not isinstance(module, nn.Module):
            return None, ()
        if module not in self._state:
            held = (*module.parameters(), *module.buffers())
            described = tuple(self._described(tensor)[0] for tensor in held)
            numbers = tuple(self._other("storage", storage_key(tensor)) for tensor in held)
            self._state[module] = described, (self._other("module", module), *numbers)
        return self._state[module]

    def _shared_storages(self) -> dict[int, int]:
        """For each attribute or input whose storage another one has too, the number of the storage."""
        holders: dict[int, list[int]] = {}
        for number, tensor in self._tensor_inputs():
            holders.setdefault(storage_key(tensor), []).append(number)
        tied = {key: numbers for key, numbers in holders.items() if len(numbers) > 1}
        return {number: self._other("storage", key) for key, numbers in tied.items() for number in numbers}

    def _tensor_inputs(self) -> Iterator[tuple[int, Tensor]]:
        graph, number, record = self._index.graph, self._index.number, self._program.export
        for node in graph.find_nodes(op="get_attr"):
            value = find(self._root, str(node.target))
            if isinstance(value, Tensor):
                yield number[node], value
        named: dict[str, str] = {}
        if record is not None:
            named = {**record.signature.inputs_to_parameters, **record.signature.inputs_to_buffers}
        for node in graph.find_nodes(op="placeholder"):
            # Traced values share storages where the tracer knew it; exported programs hold the tensors themselves.
            name, value = named.get(node.name), value_of(node)
            if record is not None and name is not None:
                value = record.state.get(name, record.constants.get(name))
            if isinstance(value, Tensor):
                yield number[node], value
