"""Sizes of a file cost no more than they are charged for, whatever their form and their length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.work import calls_during
from tests.program.archives.hard_sizes import HARD_SIZES, nested

from partita._torch.symbolic_shapes import renamed_expression
from partita.program.archives._torch.symbols import Symbols
from partita.program.archives.data import Data, NotDataError

#: Functions that may be called for each unit of work, which stands for about 0.3 ms.
_CALLS_OF_UNIT = 1_500


def size(text: str) -> Any:
    return Data({"as_expr": {"expr_str": text, "hint": {"as_int": 6}}})


def symbols(first: int, count: int) -> tuple[Symbols, list[str]]:
    """A reader that knows these symbols, and their names."""
    made, names = Symbols(None), [f"s{first + at}" for at in range(count)]
    for name in names:
        made.integer(size(f"Symbol('{name}', positive=True, integer=True)"))
    return made, names


def _used(made: Symbols, text: str) -> None:
    """What reading a program and planning it do with a size, or its refusal."""
    try:
        number = made.integer(size(text))
    except NotDataError:
        return
    if isinstance(number, torch.SymInt):
        renamed_expression(number, {})
        str(number.node.expr)


@pytest.mark.parametrize("form", sorted(HARD_SIZES))
def test_a_size_costs_what_it_is_charged_for(form: str) -> None:
    """At any length: a form whose cost grows faster than its charge exceeds it at one of them."""
    for place, length in enumerate((3, 12, 36)):
        first = 1_000 + 100 * (100 * sorted(HARD_SIZES).index(form) + place)  # New symbols: sympy caches what it made.
        made, names = symbols(first, length)
        before = made._work
        calls = calls_during(_used, made, HARD_SIZES[form](names))
        assert calls < _CALLS_OF_UNIT * (made._work - before + 100), length


@pytest.mark.parametrize("function", ["Max", "Min", "And", "Or", "max", "min"])
def test_a_size_has_a_few_operands_of_max_and_min(function: str) -> None:
    is_of_truths = function in ("And", "Or")
    made, names = symbols(0, 14)
    parts = [f"{name} >= 7" for name in names] if is_of_truths else names
    read = made.truth if is_of_truths else made.integer

    def given(count: int) -> Any:
        text = nested(function, parts[:count])
        return Data({"as_expr": {"expr_str": text, "hint": None}})

    assert read(given(13)) is not None
    with pytest.raises(NotDataError, match="more than 24 operands of Max, Min, And and Or"):
        read(given(14))


def test_fractions_have_small_parts() -> None:
    """Any number of fractions of large ones have the same hash, and so have the sizes that they are in."""
    made, _ = symbols(0, 1)
    assert made.integer(size("TruncToInt(Rational(3, 2)*s0)")) is not None
    with pytest.raises(NotDataError, match="'Rational' has no place in it"):
        made.integer(size(f"TruncToInt(Rational({1 << 31}, 3)*s0)"))
