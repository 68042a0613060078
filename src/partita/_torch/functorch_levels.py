"""Levels of torch.func's transforms: the functions by which a graph starts and ends one, and leaving those open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._functorch import predispatch
from torch.fx import Graph

__all__ = [
    "ENDS_OF_LEVELS",
    "STARTS_OF_LEVELS",
    "Entered",
    "close_dual_level",
    "close_levels",
    "count_levels",
    "entered_by",
    "entered_by_any",
    "is_dual_level_open",
]

#: Taken once: while a model is captured, other things stand in these places.
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
    """Whether forward-mode AD has its one level, in any thread; torch tells only by refusing to open it again."""
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
    """Which levels a graph starts: they stay open where a node behind the start raises."""

    transform: bool
    dual_level: bool


def entered_by(graph: Graph) -> Entered:
    return Entered(_calls(graph, STARTS_OF_LEVELS), _calls(graph, _STARTS_OF_DUAL_LEVEL))


def entered_by_any(parts: Iterable[Entered]) -> Entered:
    """Which levels graphs start together: of those that call each other, one may start what another one ends."""
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
