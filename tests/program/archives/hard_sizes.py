"""Texts of sizes that torch and sympy take long for, of any length: what the tests of costs and the fuzz draw from."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise


def nested(function: str, parts: list[str]) -> str:
    """A function of a part and of the function of the others."""
    return reduce(lambda inner, part: f"{function}({part}, {inner})", parts)


def _alternating(parts: list[str]) -> str:
    return reduce(
        lambda inner, at: f"{'Max' if at % 2 else 'Min'}({parts[at]}, {inner})", range(1, len(parts)), parts[0]
    )


def _divided(parts: list[str]) -> str:
    return reduce(lambda inner, at: f"(({inner}) + {parts[at]})//{2 + at % 3}", range(1, len(parts)), parts[0])


def _pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(pairwise(parts))


#: A size of these parts, by the name of its form.
HARD_SIZES: dict[str, Callable[[list[str]], str]] = {
    "Max in Max": lambda parts: nested("Max", parts),
    "Min and Max": _alternating,
    "Max of sums": lambda parts: f"Max({' + '.join(parts)}, {' + '.join(parts[1:])} + 1)",
    "sum of Max": lambda parts: " + ".join(f"Max({a}, {b})" for a, b in _pairs(parts)),
    "product of Max": lambda parts: " * ".join(f"Max(1, {part})" for part in parts),
    "Max of quotients": lambda parts: nested("Max", [f"({a} + {b})//3" for a, b in _pairs(parts)]),
    "sum": " + ".join,
    "product": " * ".join,
    "product of sums": lambda parts: " * ".join(f"({a} + {b})" for a, b in _pairs(parts)),
    "fractions": lambda parts: " + ".join(f"Rational({at + 1}, {at + 7})*{part}" for at, part in enumerate(parts)),
    "remainders": lambda parts: nested("Mod", parts),
    "remainder of a sum": lambda parts: f"({' + '.join(parts)}) % 7",
    "sum of remainders": lambda parts: " + ".join(f"({part} % {at + 2})" for at, part in enumerate(parts)),
    "quotients": lambda parts: nested("FloorDiv", parts),
    "quotients of sums": _divided,
    "rounded up": lambda parts: f"{'CeilDiv(' * len(parts)}{parts[0]}{', 3)' * len(parts)}",
    "bits": lambda parts: nested("BitwiseFn_bitwise_and", parts),
    "floats": lambda parts: f"TruncToInt({' * '.join(f'ToFloat({part})' for part in parts)})",
}
