"""Shape guards of a compiled function, as data that closures check.

A compiler adds guards to the shape environment of its fake inputs, and its code is only valid where they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from partita._torch.expressions import Expression, ExpressionError, Operation, Read, evaluator
from partita._torch.symbolic_shapes import symbolic_expression
from partita.program._torch.guards import functions_of_conditions

#: Whether a compiled function may be used for these inputs.
Check: TypeAlias = Callable[[Sequence[Any]], bool]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a number is among the inputs of a call, and the symbolic number that was there for the compiler."""

    read: Read
    #: The expression before compilation: what a compiler finds to be equal, it replaces in all numbers.
    expression: Any
    hint: int | None

    @classmethod
    def of(cls, read: Read, number: torch.SymInt) -> Place:
        """The place of a number that no compiler has seen."""
        return cls(read, number.node.expr, number.node.hint)


def symbolic_places(inputs: Sequence[Any]) -> list[Place]:
    """Every symbolic number of fake inputs, sizes and integers first; call it before compilation."""
    found: list[Place] = []
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [Place.of(Read(place, "size", axis), size) for axis, size in _symbolic(value.shape)]
        elif isinstance(value, torch.SymInt):
            found.append(Place.of(Read(place), value))
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [Place.of(Read(place, "stride", axis), stride) for axis, stride in _symbolic(value.stride())]
    return found


def conditions_of(inputs: Sequence[Place], env: Any) -> tuple[Expression, ...] | None:
    """The guards on symbolic numbers, as conditions on inputs; None where there are no symbols."""
    places: dict[str, Read] = {}
    conditions: dict[Expression, None] = {}
    derived: list[Place] = []
    for place in inputs:
        if place.expression.is_symbol and str(place.expression) not in places:
            places[str(place.expression)] = place.read
        else:
            derived.append(place)
    if not places:
        return None
    try:
        conditions |= dict.fromkeys(
            Operation("==", (place.read, _on_places(place.expression, places))) for place in derived
        )
        conditions |= dict.fromkeys(_on_places(guard.expr, places) for guard in env.guards)
    except ExpressionError:
        # A guard that cannot be expressed is known to hold for the sizes of this call only.
        exact = [(places[symbol], value) for symbol, value in _values(env) if symbol in places]
        exact += [(place.read, place.hint) for place in derived if place.hint is not None]
        conditions |= dict.fromkeys(Operation("==", (found, int(value))) for found, value in exact)
    conditions |= dict.fromkeys(_bounds(env, places))
    return tuple(conditions)


def check_from(conditions: Sequence[Expression]) -> Check:
    """A function that checks the conditions of `conditions_of`."""
    return evaluator(Operation("and", tuple(conditions)), functions_of_conditions())


def _symbolic(numbers: Iterable[Any]) -> Iterator[tuple[int, torch.SymInt]]:
    return ((axis, number) for axis, number in enumerate(numbers) if isinstance(number, torch.SymInt))


def _on_places(expression: Any, places: dict[str, Read]) -> Expression:
    """A condition on the inputs; raises where a symbol belongs to no input."""
    placed = symbolic_expression(expression, places)
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
