"""Expressions: what is read from a text means what Python means by it, and is printed so that it means it again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita._torch.expressions import (
    Expression,
    ExpressionError,
    InputPath,
    Operation,
    Read,
    Symbol,
    evaluator,
    parsed,
    printed,
    substituted,
)

NUMBERS = st.integers(-9, 99) | st.sampled_from([0.5, 2.0])
BINARY = ("+", "-", "*", "//", "%", "/", "==", "!=", "<", "<=", ">", ">=", "and", "or")
INPUTS = (7, 12, torch.ones(3, 5))
READS = st.sampled_from([Read(0), Read(1), Read(2, "size", 0), Read(2, "size", 1), Read(2, "dim")])


def _larger(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.builds(lambda name, a, b: Operation(name, (a, b)), st.sampled_from(BINARY), parts, parts),
        st.builds(lambda name, a, b: Operation(name, (a, b)), st.sampled_from(["max", "min"]), parts, parts),
        st.builds(lambda a, power: Operation("**", (a, power)), parts, st.integers(0, 3)),
        st.builds(lambda name, a: Operation(name, (a,)), st.sampled_from(["neg", "not"]), parts),
    )


def _computed(expression: Expression) -> Any:
    try:
        return evaluator(expression)(INPUTS)
    except (ZeroDivisionError, OverflowError) as error:
        return type(error)


def _by_python(text: str) -> Any:
    names = {"args": INPUTS, "max": max, "min": min, "inf": math.inf}
    try:
        return eval(text, names)
    except (ZeroDivisionError, OverflowError) as error:
        return type(error)


@given(st.recursive(NUMBERS | READS, _larger, max_leaves=12))
def test_an_expression_means_what_python_means_by_its_text(expression: Expression) -> None:
    assert _computed(expression) == _by_python(printed(expression))


@given(st.recursive(NUMBERS | st.builds(Symbol, st.sampled_from(["a", "b"])), _larger, max_leaves=12))
def test_what_is_printed_is_read_again(expression: Expression) -> None:
    again = parsed(printed(expression))
    values = {"a": 7, "b": 12}
    ours, theirs = (
        _computed(substituted(each, lambda part: values[part.name] if isinstance(part, Symbol) else part))
        for each in (expression, again)
    )
    assert ours == theirs


def test_a_path_with_a_question_is_read() -> None:
    path = InputPath(("d", "k", 3, "field"), (True, True, True, False))
    assert parsed("L['d']['k'][3].field.size()[1]") == Read(path, "size", 1)
    assert printed(Read(path, "size", 1)) == "L['d']['k'][3].field.size()[1]"


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 +", "(1", "1)", "1 < 2 < 3", "a b", "L", "L.x", "L[x]", "L['x'].__class__", "L['x'].item()", "a.b"),
        *("L['x'].size(0)", "f(a=1, 2)", "99999999999999999999", "1e999", "'a", "a # b", "lambda: 1", "[1]", "{1}"),
        *("(" * 100 + "1" + ")" * 100, "L[" * 100 + "0" + "]" * 100, "-" * 100 + "1", "a\nb", "1 +" * 500 + "1"),
    ],
)
def test_what_is_not_in_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parsed(text)


@pytest.mark.parametrize("text", ["unknown(1)", "symbol + 1", "L['x'].size()[0]", "max(1, k=2)"])
def test_what_has_no_meaning_is_refused_before_it_is_computed(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluator(parsed(text))
