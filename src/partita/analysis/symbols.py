"""Symbolic sizes and scalars: which symbols traced values mention, and where in a graph each one can be read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch.fx import Node

from partita._torch.operator_schemas import nodes_by_target
from partita._torch.symbolic_shapes import NUMBER_FUNCTIONS, is_unbacked, symbol_of, symbols_in
from partita.analysis.index import Index
from partita.analysis.nodes import value_of


def symbolic_scalars_of(index: Index) -> frozenset[int]:
    """The nodes, by number, that compute a boolean or float from numbers alone, the same in every mode."""
    by_target = nodes_by_target(index.graph).items()
    calls = (nodes for (op, target), nodes in by_target if target in NUMBER_FUNCTIONS or op == "call_method")
    return frozenset(index.number[node] for nodes in calls for node in nodes if _is_scalar(node))


def _is_scalar(node: Node) -> bool:
    """Integers do not count: they cross region borders as they are. Nor do results of `.item()`, which reads memory.

    A float argument is an exception: Dynamo passes it as a tensor that nothing else reads, and calls `.item()`.
    """
    value = value_of(node)
    if node.op == "call_method":
        return node.target == "item" and isinstance(value, torch.SymFloat) and _is_float_argument(node.args[0])
    # The value of one that is always the same, as that of `n == 5` after a check that it is so, may be a plain number.
    return isinstance(value, torch.SymBool | torch.SymFloat | bool | float) and all(
        isinstance(value_of(read), _NUMBERS) for read in node.all_input_nodes
    )


def _is_float_argument(node: object) -> bool:
    """Whether a node is a number that Dynamo passes as a tensor: what its `.item()` returns is known before a run."""
    if not isinstance(node, Node) or node.op != "placeholder":
        return False
    symbols = [symbol_of(value_of(user)) for user in node.users if user.op == "call_method" and user.target == "item"]
    # Every user gets the number: a tensor of the caller may have others, and its number is not known before a run.
    return len(symbols) == len(node.users) and all(one is not None and not is_unbacked(one) for one in symbols)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Dimension(NamedTuple):
    """The size of one dimension of the tensor that a node returns."""

    number: int
    axis: int


@dataclass(frozen=True, slots=True)
class _Places:
    """Where symbols can be read: symbolic inputs, sizes of tensor inputs, and symbolic results of other nodes."""

    inputs: dict[Any, int]
    sizes: dict[Any, Dimension]
    results: dict[Any, int]


@final
class Symbols:
    """The symbols of one graph, found on the first query about a value that mentions one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._mentioned: dict[int, tuple[Any, ...]] = {}

    def sources(self, number: int) -> list[tuple[int | Dimension, Any]]:
        """For each symbol that the value of node `number` mentions: where to read it, and the symbol itself."""
        found = []
        for symbol in self._mentions(number):
            place = self._place(symbol, number)
            if place is not None:
                found.append((place, symbol))
        return found

    def symbol_at(self, number: int) -> Any:
        """The symbol that node `number` returns, if its result is exactly one symbol; else None."""
        return symbol_of(value_of(self._index.nodes[number]))

    def _mentions(self, number: int) -> tuple[Any, ...]:
        known = self._mentioned.get(number)
        if known is None:
            known = self._mentioned[number] = symbols_in(value_of(self._index.nodes[number]))
        return known

    def _place(self, symbol: Any, number: int) -> int | Dimension | None:
        places = self._places
        if symbol in places.inputs:
            return places.inputs[symbol]
        if symbol in places.sizes and not is_unbacked(symbol):
            return places.sizes[symbol]
        computed = places.results.get(symbol)
        # A later result cannot be used: the value exists before it.
        if computed is not None and computed <= number:
            return computed
        return _bare_sizes(number, value_of(self._index.nodes[number])).get(symbol)

    @cached_property
    def _places(self) -> _Places:
        places = _Places({}, {}, {})
        for number, node in enumerate(self._index.nodes):
            value = value_of(node)
            if value is None:
                continue
            symbol = symbol_of(value)
            if symbol is not None:
                (places.inputs if node.op == "placeholder" else places.results).setdefault(symbol, number)
            elif node.op == "placeholder":
                for found, dimension in _bare_sizes(number, value).items():
                    places.sizes.setdefault(found, dimension)
        return places


def _bare_sizes(number: int, value: Any) -> dict[Any, Dimension]:
    if not isinstance(value, torch.Tensor):
        return {}
    sizes: dict[Any, Dimension] = {}
    for axis, size in enumerate(value.shape):
        symbol = symbol_of(size)
        if symbol is not None:
            sizes.setdefault(symbol, Dimension(number, axis))
    return sizes
