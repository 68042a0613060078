"""Calling conventions: what a call gives to each input of its body, and what the call returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

from partita.errors import OptionError

__all__ = ["bound_arguments", "returned_value"]


def bound_arguments(
    call: Node, graph: Graph, operands: Sequence[Any] | None = None, keywords: Mapping[str, Any] | None = None
) -> dict[Node, Any]:
    """What `call` gives to each input of the body `graph`: by position, by keyword, or its default.

    The operands are all arguments of the call, unless it is an operator that takes others before them.
    """
    positional = call.args if operands is None else operands
    named = call.kwargs if keywords is None else keywords
    inputs = graph.find_nodes(op="placeholder")
    trees = _trees_of(call, graph)
    if trees is None:
        parameters = [(str(node.target), node.args) for node in inputs]
        return dict(zip(inputs, _bound(call, parameters, positional, named), strict=True))
    parameters = [(name, ()) for name in trees.orig_args]
    given = dict(zip(trees.orig_args, _bound(call, parameters, positional, named), strict=True))
    by_place, by_name = trees.in_spec.children()
    places = trees.orig_args[: by_place.num_children]
    names = by_name.context or trees.orig_args[by_place.num_children :]
    value = (tuple(_plain(given[name]) for name in places), {name: _plain(given[name]) for name in names})
    try:
        return dict(zip(inputs, trees.in_spec.flatten_up_to(value), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"the arguments of the call {call.name!r} are nested otherwise than its body takes them apart: {error}"
        ) from error


def returned_value(call: Node, output: Node) -> Any:
    """What a body returns, in terms of its own nodes."""
    trees = _trees_of(call, output.graph)
    if trees is None or trees.out_spec is None:
        return output.args[0]
    flat: Any = output.args[0]
    value = trees.out_spec.unflatten(list(flat))
    if not _can_be_argument(value):
        raise OptionError(
            f"the body of the call {call.name!r} returns {type(value).__name__}, which no node can be given; "
            "return tuples, lists or dicts"
        )
    return value


def _trees_of(call: Node, graph: Graph) -> Any:
    """How the code around a graph takes arguments apart and puts results together; None where it does not."""
    convention = graph._codegen
    if type(convention) is CodeGen:
        return None
    if hasattr(convention, "pytree_info"):
        return convention.pytree_info
    raise OptionError(
        f"the body of the call {call.name!r} has a calling convention of its own, {type(convention).__name__}; "
        "set it to torch.fx.graph.CodeGen"
    )


def _bound(
    call: Node,
    parameters: Sequence[tuple[str, tuple[Any, ...]]],
    operands: Sequence[Any],
    keywords: Mapping[str, Any],
) -> list[Any]:
    """A value for each parameter, given as its name and, in a tuple, its default."""
    values: list[Any] = []
    positional, named = deque(operands), dict(keywords)
    for name, default in parameters:
        if name.startswith("**"):
            values.append(named)
            named = {}
        elif name.startswith("*"):
            values.append(tuple(positional))
            positional.clear()
        elif positional:
            values.append(positional.popleft())
        elif name in named:
            values.append(named.pop(name))
        elif default:
            values.append(default[0])
        else:
            raise OptionError(f"the call {call.name!r} gives no value for {name!r}; pass one, or give it a default")
    if positional or named:
        extra = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
        raise OptionError(f"the call {call.name!r} gives more than its body takes: {extra}; take it out")
    return values


def _plain(value: Any) -> Any:
    """An argument with plain containers, which trees are made of, in place of fx's own."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _can_be_argument(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_can_be_argument, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_can_be_argument, value))
    return value is None or isinstance(value, Node | bool | int | float | complex | str)
