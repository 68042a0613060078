"""Symbolic numbers: the symbols that a traced value mentions, and expressions of them as nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from partita._torch.expressions import Expression, ExpressionError, Read, Symbol, evaluator, parsed, substituted

#: The functions by which exported programs compute with numbers; applied to numbers, they return numbers.
NUMBER_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(getattr(operator, name) for name in operator.__all__ if name != "call"),
        *(function for function in vars(math).values() if callable(function)),
        *(function for name, function in vars(torch).items() if name.startswith(("sym_", "_sym_"))),
    )
)

#: The classes of symbolic numbers.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbols_in(value: Any) -> tuple[Any, ...]:
    """The free symbols of a tensor, symbolic number or container of them, sorted by name."""
    if not _is_symbolic(value):
        return ()
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return tuple(sorted(free_symbols(value), key=str))


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether sizes, strides or the offset of a tensor are symbolic."""
    from torch.fx.experimental.symbolic_shapes import has_symbolic_sizes_strides

    return bool(has_symbolic_sizes_strides(tensor))


def symbol_of(value: Any) -> Any:
    """The symbol, if `value` is exactly one symbol; else None."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return None
    expression = value.node.expr
    return expression if expression.is_symbol else None


def constant_size(value: int) -> torch.SymInt:
    """A symbolic number that is always `value`, which torch saves as an input with a name, and not as a constant."""
    import sympy  # type: ignore[import-untyped]
    from torch.fx.experimental.sym_node import SymNode

    return torch.SymInt(SymNode(sympy.Integer(value), _environment_of_constants(), int, value))


@cache
def _environment_of_constants() -> Any:
    """A shape environment without symbols; one takes as much memory as hundreds of numbers, so that all share it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def hint_of(value: Any, default: int = 1) -> Any:
    """A number itself; of a symbolic one its hint, the value in the trace, or `default` where it has none."""
    if not isinstance(value, SYMBOLIC):
        return value
    return value.node.hint if value.node.has_hint() else default


def is_unbacked(symbol: Any) -> bool:
    """Whether the symbol's value is only known once the program has run up to it."""
    return str(symbol).startswith(("u", "zuf"))


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever their values are; it adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return has_symbolic_sizes(value)
    if isinstance(value, tuple | list):
        return any(map(_is_symbolic, value))
    return isinstance(value, SYMBOLIC)


def write_number(number: torch.SymInt, by_symbol: Mapping[Any, Node]) -> Node | int | None:
    """A new node that computes `number` from these nodes, or a constant; None if the node for a symbol is missing."""
    expression = number.node.expr
    if expression.is_number:
        return int(expression)
    if not by_symbol.keys() >= expression.free_symbols:
        return None
    tracers = {node.graph: GraphAppendingTracer(node.graph) for node in by_symbol.values()}
    places = {symbol.name: Read(place) for place, symbol in enumerate(by_symbol)}
    proxies = [Proxy(node, tracers[node.graph]) for node in by_symbol.values()]
    made: Node = evaluator(symbolic_expression(expression, places))(proxies).node
    _set_values(made)
    return made


def symbolic_expression(expression: Any, places: Mapping[str, Expression] | None = None) -> Expression:
    """A sympy expression as data, with symbols by name, or with the `places` of these names instead."""
    # This imports sympy, which takes longer than importing all of Partita.
    from torch.utils._sympy.printers import PythonPrinter

    found = parsed(PythonPrinter().doprint(expression))
    return found if places is None else substituted(found, partial(_place_of, places))


def _place_of(places: Mapping[str, Expression], part: Symbol | Read) -> Expression:
    if isinstance(part, Symbol) and part.name not in places:
        raise ExpressionError(f"the symbol {part.name!r} is of no input")
    return places[part.name] if isinstance(part, Symbol) else part


def _set_values(node: Node) -> None:
    """Sets the value of a node that computes a number, and of the nodes it reads: torch.export requires all of them."""
    function: Any = node.target
    if node.op != "call_function" or "val" in node.meta:
        return
    for read in node.all_input_nodes:
        _set_values(read)
    if all("val" in read.meta for read in node.all_input_nodes):
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
        node.meta["val"] = function(*args, **kwargs)


def renamed_expression(number: Any, known: dict[Any, tuple[str, tuple[Any, ...]]]) -> tuple[str, tuple[Any, ...]]:
    """The expression of a symbolic number as text, with its symbols numbered, and these symbols in that order.

    `known` caches the results: a graph has few expressions and many values.
    """
    expression = getattr(number.node, "expr", None)
    if expression is None:  # The length of a jagged dimension.
        return str(number), ()
    found = known.get(expression)
    if found is None:
        # Names end in numbers: `s9` comes before `s10`.
        symbols = tuple(sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name)))
        renamed = expression.xreplace({symbol: type(symbol)(f"_{at}") for at, symbol in enumerate(symbols)})
        found = known[expression] = (str(renamed), symbols)
    return found
