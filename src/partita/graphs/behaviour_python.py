"""The behaviour of Python's own functions: `operator`, `math` and the builtins."""

from __future__ import annotations

import builtins
import math
import operator
import typing
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from partita._torch.containers import returns_container
from partita.graphs.behaviour_terms import (
    ALIASES,
    ALIASING,
    EVERY,
    FIRST,
    IMPURE,
    PURE,
    QUIET,
    UNKNOWN,
    Behaviour,
    Rule,
)
from partita.graphs.values import value_of

__all__ = ["PYTHON_RULES"]


def _of_concatenation(node: Node) -> Behaviour:
    """`+` and `*` copy tensors and numbers, but a list made from lists holds the items of both."""
    return ALIASING if all(map(_may_concatenate, node.args)) else PURE


def _of_update(node: Node) -> Behaviour:
    """`+=` writes its left side; a list then also holds the items of the right side."""
    return Behaviour(writes=(FIRST,), aliases=(EVERY,) if any(map(_is_container, node.args)) else (FIRST,))


def _of_setitem(node: Node) -> Behaviour:
    """A tensor copies what is put into it; a list or dict keeps it."""
    container, key = node.args[0], node.args[1]
    is_tensor = key is None or isinstance(key, slice | tuple | Node | type(...))
    if isinstance(container, Node) and isinstance(value_of(container), torch.Tensor):
        is_tensor = True
    return Behaviour(writes=(FIRST,), aliases=(FIRST,) if is_tensor else (EVERY,))


def _may_concatenate(value: object) -> bool:
    """A list is added to a list, or repeated so many times; a tensor takes part in neither."""
    return isinstance(value, int) or _is_container(value)


def _is_container(value: object) -> bool:
    if not isinstance(value, Node):
        return isinstance(value, tuple | list)
    traced = value_of(value)
    if traced is not None:
        return isinstance(traced, tuple | list)
    # An input without a traced value may be a list as well as a tensor.
    return (
        value.op == "placeholder"
        or value.target in (list, tuple)
        or (value.op in ("call_function", "call_method") and returns_container(value.target))
    )


def _named(module: object, names: Iterable[str], rule: Rule) -> dict[Any, Rule]:
    return {getattr(module, name): rule for name in names if callable(getattr(module, name, None))}


_KEEPS = Rule(Behaviour(writes=(FIRST,), aliases=(EVERY,)))

_QUIET_BUILTINS = """
    abs all any bool bytes callable chr complex divmod float format hasattr hash hex id int isinstance issubclass len
    oct ord pow range repr round slice str sum type
"""
_ALIASING_BUILTINS = "dict enumerate frozenset getattr iter list max min reversed set sorted tuple zip"
_UPDATES = """
    iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
"""

#: Every function of the language whose behaviour we know.
PYTHON_RULES: dict[Any, Rule] = {
    **_named(math, dir(math), QUIET),
    **_named(operator, operator.__all__, QUIET),
    **_named(operator, ("pos",), ALIASES),
    **_named(operator, ("attrgetter", "call", "itemgetter", "methodcaller"), Rule(UNKNOWN)),
    **_named(operator, _UPDATES.split(), Rule(UNKNOWN, _of_update)),
    **_named(operator, ("add", "mul", "or_"), Rule(PURE, _of_concatenation, is_quiet=True)),
    **_named(builtins, _QUIET_BUILTINS.split(), QUIET),
    **_named(builtins, _ALIASING_BUILTINS.split(), ALIASES),
    **_named(builtins, ("delattr", "next", "setattr"), _KEEPS),
    operator.concat: ALIASES,
    operator.delitem: _KEEPS,
    operator.getitem: Rule(Behaviour(aliases=((0, "a"),)), is_quiet=True),
    operator.setitem: Rule(UNKNOWN, _of_setitem),
    print: IMPURE,
    typing.cast: ALIASES,
}
