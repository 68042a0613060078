"""Conditions of a compiled function: what its symbols must satisfy, as the text of a Python function that checks it.

A compiler asks the shape environment of its fake inputs questions, and its code rests on the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Check", "Place", "check_from", "conditions_of", "symbolic_places"]

#: Tells whether a compiled function may be used for these inputs.
Check: TypeAlias = Callable[[Sequence[Any]], bool]

#: The text that reads a number from the inputs `v` of a call, and the symbolic number that was there for the compiler.
Place: TypeAlias = tuple[str, torch.SymInt]


def symbolic_places(inputs: Sequence[Any]) -> list[Place]:
    """Every symbolic number of fake inputs, sizes and integers first; ask before a compiler has had them."""
    found: list[Place] = []
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [(f"v[{place}].size({axis})", size) for axis, size in _symbolic(value.shape)]
        elif isinstance(value, torch.SymInt):
            found.append((f"v[{place}]", value))
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [(f"v[{place}].stride({axis})", stride) for axis, stride in _symbolic(value.stride())]
    return found


def conditions_of(inputs: Sequence[Place], env: Any) -> str | None:
    """The source of a check that symbolic numbers are what they were taken for; None where there are none."""
    places: dict[str, str] = {}
    conditions: dict[str, None] = {}
    for found, expected in inputs:
        expression = expected.node._expr
        if expression.is_symbol and str(expression) not in places:
            places[str(expression)] = found
        else:
            conditions[f"{found} == {_printed(expression)}"] = None
    if not places:
        return None
    expressions = [guard.expr for guard in env.guards]
    strangers = {str(symbol) for expression in expressions for symbol in expression.free_symbols} - places.keys()
    if strangers:
        # What cannot be asked again holds for the sizes that it was asked about.
        conditions |= dict.fromkeys(f"{symbol} == {value}" for symbol, value in _values(env) if symbol in places)
    else:
        conditions |= dict.fromkeys(map(_printed, expressions))
    conditions |= dict.fromkeys(_bounds(env, places))
    lines = [*(f"    {symbol} = {found}" for symbol, found in places.items())]
    return "\n".join(["def check(v):", *lines, f"    return {' and '.join(conditions) or True}"])


def check_from(source: str) -> Check:
    """The function that `conditions_of` wrote down."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    space: dict[str, Any] = dict(SYMPY_INTERP)
    exec(source, space)
    check: Check = space["check"]
    return check


def _symbolic(numbers: Iterable[Any]) -> Iterator[tuple[int, torch.SymInt]]:
    return ((axis, number) for axis, number in enumerate(numbers) if isinstance(number, torch.SymInt))


def _bounds(env: Any, places: dict[str, str]) -> Iterator[str]:
    for symbol, allowed in env.var_to_range.items():
        if str(symbol) in places:
            yield from (f"{symbol} >= {allowed.lower}" for _ in range(allowed.lower.is_Integer))
            yield from (f"{symbol} <= {allowed.upper}" for _ in range(allowed.upper.is_Integer))


def _values(env: Any) -> Iterator[tuple[str, Any]]:
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val  # torch 2.11 has the second name only.
    return ((str(symbol), value) for symbol, value in values.items())


def _printed(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return f"({PythonPrinter().doprint(expression)})"
