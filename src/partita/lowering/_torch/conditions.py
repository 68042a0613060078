"""Conditions of a compiled function: what its symbols must satisfy, as data that closures check.

A compiler asks the shape environment of its fake inputs questions, and its code rests on the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partita._torch.expressions import Expression, ExpressionError, Operation, Read, Symbol, evaluator, substituted
from partita.program._torch.guards import functions_of_conditions, symbolic_expression

__all__ = ["Check", "Place", "check_from", "conditions_of", "symbolic_places"]


#: Tells whether a compiled function may be used for these inputs.
Check: TypeAlias = Callable[[Sequence[Any]], bool]

#: Where a number is among the inputs of a call, and the symbolic number that was there for the compiler.
Place: TypeAlias = tuple[Read, torch.SymInt]


def symbolic_places(inputs: Sequence[Any]) -> list[Place]:
    """Every symbolic number of fake inputs, sizes and integers first; ask before a compiler has had them."""
    found: list[Place] = []
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [(Read(place, "size", axis), size) for axis, size in _symbolic(value.shape)]
        elif isinstance(value, torch.SymInt):
            found.append((Read(place), value))
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [(Read(place, "stride", axis), stride) for axis, stride in _symbolic(value.stride())]
    return found


def conditions_of(inputs: Sequence[Place], env: Any) -> tuple[Expression, ...] | None:
    """What makes symbolic numbers what they were taken for; None where there are none."""
    places: dict[str, Read] = {}
    conditions: dict[Expression, None] = {}
    derived: list[Place] = []
    for found, expected in inputs:
        expression = expected.node._expr
        if expression.is_symbol and str(expression) not in places:
            places[str(expression)] = found
        else:
            derived.append((found, expected))
    if not places:
        return None
    try:
        conditions |= dict.fromkeys(
            Operation("==", (found, _on_places(expected.node._expr, places))) for found, expected in derived
        )
        conditions |= dict.fromkeys(_on_places(guard.expr, places) for guard in env.guards)
    except ExpressionError:
        # What cannot be asked again holds for the sizes that it was asked about.
        exact = [(places[symbol], value) for symbol, value in _values(env) if symbol in places]
        exact += [(found, expected.node.hint) for found, expected in derived if expected.node.hint is not None]
        conditions |= dict.fromkeys(Operation("==", (found, int(value))) for found, value in exact)
    conditions |= dict.fromkeys(_bounds(env, places))
    return tuple(conditions)


def check_from(conditions: Sequence[Expression]) -> Check:
    """The check of what `conditions_of` gave."""
    return evaluator(Operation("and", tuple(conditions)), functions_of_conditions())


def _symbolic(numbers: Iterable[Any]) -> Iterator[tuple[int, torch.SymInt]]:
    return ((axis, number) for axis, number in enumerate(numbers) if isinstance(number, torch.SymInt))


def _on_places(expression: Any, places: dict[str, Read]) -> Expression:
    """A condition on the inputs; raises where it is about a symbol that is at no place."""

    def found(part: Symbol | Read) -> Expression:
        if isinstance(part, Symbol) and part.name not in places:
            raise ExpressionError(f"the symbol {part.name!r} is of no input")
        return places[part.name] if isinstance(part, Symbol) else part

    placed = substituted(symbolic_expression(expression), found)
    evaluator(placed, functions_of_conditions())
    return placed


def _bounds(env: Any, places: dict[str, Read]) -> Iterator[Expression]:
    for symbol, allowed in env.var_to_range.items():
        found = places.get(str(symbol))
        if found is not None and allowed.lower.is_Integer:
            yield Operation(">=", (found, int(allowed.lower)))
        if found is not None and allowed.upper.is_Integer:
            yield Operation("<=", (found, int(allowed.upper)))


def _values(env: Any) -> Iterator[tuple[str, Any]]:
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val  # torch 2.11 has the second name only.
    return ((str(symbol), value) for symbol, value in values.items())
