"""Inputs of generated programs: placeholders in all their forms, and their values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import PH, Graph, Node, symbolic_trace  # type: ignore[attr-defined]

from partita.testing.generator.draft import Draft
from partita.testing.generator.recipe import Input
from partita.testing.generator.state import ramp

PLAIN_INPUT_KINDS = ("plain", "leaf")
INPUT_KINDS = (
    *("plain", "leaf", "row", "same", "view", "leaf_view", "int", "float", "flag", "none"),
    *("unused", "renamed", "typed", "keyword", "default", "rest", "options"),
)

_RANKS = {"keyword": 1, "default": 2, "rest": 3, "options": 4}
_TREE_SIZE = 4


@final
@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a program, and the values of its placeholders."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    placed: tuple[object, ...]


def in_order(inputs: Iterable[Input], *, pytree: bool = False) -> tuple[Input, ...]:
    """The inputs in an order in which Python lets a function declare them; the first is a tensor for every step."""
    lead, *rest = inputs
    if lead.kind not in PLAIN_INPUT_KINDS:
        lead, rest = Input("plain"), [lead, *rest]
    if pytree:
        rest = [(i if i.kind not in _RANKS else replace(i, kind="plain")) for i in rest]
        return (lead, *rest, *[Input("plain")] * _TREE_SIZE)[:_TREE_SIZE]
    rest = _without_second_variadics(rest)
    if any(item.kind == "rest" for item in rest):
        rest = [replace(i, kind="plain") if i.kind in ("keyword", "default") else i for i in rest]
    return (lead, *sorted(rest, key=lambda item: _RANKS.get(item.kind, 0)))


def arguments_of(inputs: Sequence[Input], *, pytree: bool = False) -> Arguments:
    """Fresh arguments for inputs in order, equal in every call."""
    values: list[Any] = []
    for place, item in enumerate(inputs):
        values.append(_value(item, place, values))
    # A copy of arguments keeps their aliasing, but not autograd's record of views among them; so that a program does in
    # a draft what it does later, these are copies as well.
    values = deepcopy(values)
    if pytree:
        first, x, *y = values
        return Arguments((first, {"x": x, "y": y}), {}, tuple(values))
    args, kwargs = [], {}
    for place, (item, value) in enumerate(zip(inputs, values, strict=True)):
        if item.kind == "rest":
            args.extend(value)
        elif item.kind == "options":
            kwargs.update(value)
        elif item.kind == "keyword" or (item.kind == "default" and item.pick % 2):
            kwargs[_NAMES[place]] = value
        elif item.kind != "default":
            args.append(value)
    return Arguments(tuple(args), kwargs, tuple(values))


def new_graph(*, pytree: bool = False) -> Graph:
    """An empty graph, or one with a nested calling convention: placeholders there, and an output to replace."""
    if not pytree:
        return Graph()
    graph = deepcopy(_tree_graph())
    graph.erase_node(graph.output_node())
    return graph


def receive_inputs(draft: Draft, inputs: Sequence[Input], arguments: Arguments) -> None:
    """Declares the inputs, and unpacks containers."""
    nodes = list(draft.graph.nodes) or [_placeholder(draft.graph, item, place) for place, item in enumerate(inputs)]
    for node, value in zip(nodes, arguments.placed, strict=True):
        draft.receive(node, value)
    for node, item in zip(nodes, inputs, strict=True):
        if item.kind == "unused":
            draft.hide(node)
        elif item.kind == "rest":
            draft.call(operator.getitem, node, item.pick % 2)
        elif item.kind == "options":
            draft.call(operator.getitem, node, "extra")


@cache
def _tree_graph() -> Graph:
    return symbolic_trace(_tree, concrete_args={"first": PH, "tree": {"x": PH, "y": [PH, PH]}}).graph


def _tree(first: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    return {"first": first, "rest": (tree["x"], [tree["y"][0]])}


_NAMES = ("x", "y", "z", "u", "v", "w", "p", "q")


def _without_second_variadics(inputs: Sequence[Input]) -> list[Input]:
    once = {item.kind: item for item in inputs if item.kind in ("rest", "options")}
    return [item for item in inputs if item.kind not in once] + list(once.values())


def _placeholder(graph: Graph, item: Input, place: int) -> Node:
    name = _NAMES[place]
    if item.kind == "rest":
        return graph.create_node("placeholder", "*args", name="args")
    if item.kind == "options":
        return graph.create_node("placeholder", "**kwargs", name="kwargs")
    if item.kind == "renamed":
        return graph.create_node("placeholder", name, name=f"l_{name}_")
    if item.kind == "typed":
        return graph.placeholder(name, type_expr=Tensor)
    return graph.placeholder(name, default_value=0.5) if item.kind == "default" else graph.placeholder(name)


def _value(item: Input, place: int, earlier: Sequence[Any]) -> Any:
    fresh = ramp(4, 6, phase=place)
    match item.kind:
        case "leaf":
            return fresh.requires_grad_()
        case "row":
            return ramp(6, phase=place)
        case "same":
            return next(value for value in earlier if isinstance(value, Tensor))
        case "view":
            return _view(item.pick, earlier, fresh)
        case "leaf_view":
            return _view(item.pick, earlier, fresh).requires_grad_()
        case "int" | "float" | "flag" | "none":
            return {"int": 2 + item.pick % 3, "float": 0.25, "flag": item.pick % 2 == 0, "none": None}[item.kind]
        case "default":
            return 0.25 if item.pick % 2 else 0.5
        case "rest":
            return (fresh, ramp(4, 6, phase=place + 0.5))
        case "options":
            return {"extra": fresh, "more": 3}
    return fresh


def _view(pick: int, earlier: Sequence[Any], fresh: Tensor) -> Tensor:
    bases = [v for v in earlier if isinstance(v, Tensor) and not v.requires_grad and v.shape == (4, 6)]
    base = bases[-1] if bases else fresh
    with torch.no_grad():
        return (base.view(4, 6), base[1:3], base[:, :3], base.t())[pick % 4]
