"""Operators by name, torch's higher-order operators, functorch levels, targets with the lifetime of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch._functorch import predispatch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph
from torch.fx.node import _get_qualified_name, has_side_effect

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# Levels of torch.func transforms: the functions that enter and leave one, and closing those left open.


#: Bound at import: while a model is captured, these functions of torch are patched.
_enter_dual_level = torch._C._enter_dual_level
_exit_dual_level = torch._C._exit_dual_level


def count_levels() -> int:
    """How many levels are open in this thread."""
    return torch._C._functorch.get_dynamic_layer_stack_depth()


def close_levels(count: int) -> None:
    """Leaves the innermost levels, until only so many are open."""
    if count_levels() > count:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(count)


def is_dual_level_open() -> bool:
    """Whether forward-mode AD has its one level, in any thread; torch only raises when it is opened again."""
    try:
        level = _enter_dual_level()
    except RuntimeError:
        return True
    _exit_dual_level(level=level)
    return False


def close_dual_level() -> None:
    """Leaves the level of forward-mode AD, if it is open."""
    if is_dual_level_open():
        _exit_dual_level(level=0)


class Entered(NamedTuple):
    """Which levels a graph enters: they stay open when a later node raises."""

    transform: bool
    dual_level: bool


def entered_by(graph: Graph) -> Entered:
    return Entered(_calls(graph, STARTS_OF_LEVELS), _calls(graph, _STARTS_OF_DUAL_LEVEL))


def entered_by_any(parts: Iterable[Entered]) -> Entered:
    """Which levels several graphs enter together: of those that call each other, one may leave what another enters."""
    several = list(parts)
    return Entered(any(one.transform for one in several), any(one.dual_level for one in several))


def _calls(graph: Graph, functions: Iterable[Callable[..., Any]]) -> bool:
    return any(graph.find_nodes(op="call_function", target=function, sort=False) for function in functions)


def _named(ending: str) -> frozenset[Callable[..., Any]]:
    places: Iterable[Any] = (torch._C._functorch, predispatch)
    return frozenset(getattr(place, name) for place in places for name in dir(place) if name.endswith(ending))


STARTS_OF_LEVELS = _named("_increment_nesting")
ENDS_OF_LEVELS = _named("_decrement_nesting")
_STARTS_OF_DUAL_LEVEL = _named("_enter_dual_level") | {_enter_dual_level}


def has_process_lifetime(target: Any) -> bool:
    """Whether `target` is an operator, a builtin or an attribute of its module, so that it may be a cache key."""
    if isinstance(target, OpOverload | OpOverloadPacket | BuiltinFunctionType):
        return True
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", None)
    return module is not None and name is not None and getattr(module, name, None) is target


#: What is wrong with a text argument that a file gives, by operator and argument; who defines an operator adds a check.
TEXT_CHECKS: dict[tuple[str, str], Callable[[str], str | None]] = {}

#: The classes of the objects in `torch.ops`; they print as their qualified name.
OPERATORS = (OpOverload, OpOverloadPacket)

SYM_SIZE = torch.ops.aten.sym_size.int


def operator_names() -> list[str]:
    """The names of all operators that are registered now, as `torch.ops` spells them, without overloads."""
    names = (name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return sorted(set(names))


def qualified_names(function: Any) -> tuple[str, ...]:
    """The names by which users refer to `function` in torch's passes; for an overload also that of its packet."""
    try:
        name = _get_qualified_name(function)
    except (RuntimeError, AttributeError, TypeError):  # A lambda or a callable object may have none.
        return ()
    return (name, name.rpartition(".")[0]) if isinstance(function, OpOverload) else (name,)


# torch's own operators that run a body as one unit, or under a mode.


WRAP = torch.ops.higher_order.wrap
WRAP_WITH_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
#: It leaves its mode switched when its body raises (seen in torch 2.13), so callers restore it.
WRAP_WITH_SET_GRAD_ENABLED = torch.ops.higher_order.wrap_with_set_grad_enabled

for _operator in (WRAP, WRAP_WITH_AUTOCAST, WRAP_WITH_SET_GRAD_ENABLED):
    # torch considers them pure, so its dead-code elimination would delete a body that only mutates (torch 2.13).
    has_side_effect(_operator)
