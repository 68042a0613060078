"""Transforms of torch.func: the levels that they enter, closing those left open, and the nodes that run inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch._functorch import predispatch
from torch.fx import Graph, Node

from partita._torch.operator_schemas import nodes_by_target

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


#: Bound at import: while a model is captured, these functions of torch are patched.
_enter_dual_level = torch._C._enter_dual_level
_exit_dual_level = torch._C._exit_dual_level


def count_levels(*, wrapping: bool = False) -> int:
    """How many levels are open in this thread; with `wrapping`, without functionalization, which wraps no tensors."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key().name != "Functionalize" for level in levels) if wrapping else len(levels)


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


# Nodes inside of transforms. Results are not cached beyond a `with` block: graphs are edited, and nodes keep their
# graph and its weights alive.


def is_inside_transform(node: Node) -> bool:
    """Whether the operands of `node` may be wrapped by a transform of torch.func."""
    found = _FOUND.get()
    if found is not None and found[0] is node.graph:
        return node in found[1]
    depth = sum(map(node.__ge__, _calls_of(node.graph, STARTS_OF_LEVELS)))
    return depth > sum(map(node.__gt__, _calls_of(node.graph, ENDS_OF_LEVELS))) if depth else False


@contextmanager
def transforms_found_once(graph: Graph) -> Iterator[None]:
    """Finds the transforms of a graph once for all queries inside; the graph must not be edited meanwhile."""
    token = _FOUND.set((graph, _nodes_inside(graph)))
    try:
        yield
    finally:
        _FOUND.reset(token)


def _calls_of(graph: Graph, functions: frozenset[object]) -> Iterable[Node]:
    by_target = nodes_by_target(graph)
    return chain.from_iterable([by_target.get(("call_function", function), ()) for function in functions])


def _nodes_inside(graph: Graph) -> frozenset[Node]:
    starts, ends = (frozenset(_calls_of(graph, functions)) for functions in (STARTS_OF_LEVELS, ENDS_OF_LEVELS))
    inside: list[Node] = []
    depth = 0
    for node in graph.nodes if starts else ():
        depth += node in starts
        if depth > 0:
            inside.append(node)
        depth -= node in ends
    return frozenset(inside)


#: The graph that is queried, and its nodes inside transforms.
_FOUND: ContextVar[tuple[Graph, frozenset[Node]] | None] = ContextVar("transforms found", default=None)
