"""What the tests of splitting share: graphs written by hand, every way to cut one, and dumps to compare."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import Graph, GraphModule, Node

import partita
from partita.compat.split_module import split_module, split_module_simple
from partita.policies import ByLabel
from partita.treatments import Call

Label = Callable[[Node], Hashable]
Cut = Callable[[GraphModule, Label], GraphModule]


class Draft:
    """A graph module written node by node; state is given by keyword."""

    def __init__(self, **state: Any) -> None:
        self.graph = Graph()
        self.root = nn.Module()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.root.register_buffer(name, value)
            else:
                setattr(self.root, name, value)

    def input(self, name: str, *default: Any, **meta: Any) -> Node:
        node = self.graph.create_node("placeholder", name, default)
        node.meta.update(meta)
        return node

    def call(
        self, function: Callable[..., Any], *args: Any, meta: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta.update(meta or {})
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_method(name, args, kwargs)

    def module(self, path: str, *args: Any) -> Node:
        return self.graph.call_module(path, args)

    def attr(self, path: str) -> Node:
        return self.graph.create_node("get_attr", path)

    def grad(self, enabled: Any) -> Node:
        return self.call(torch._C._set_grad_enabled, enabled)

    def enter_autocast(self, dtype: Any = torch.bfloat16, enabled: bool = True, device: str = "cpu") -> Node:
        return self.call(_enter_autocast, device, dtype, enabled, None)

    def exit_autocast(self, entered: Node) -> Node:
        return self.call(_exit_autocast, entered)

    def enter_inference(self, mode: bool = True) -> Node:
        return self.call(_enter_inference_mode, mode)

    def exit_inference(self, entered: Node) -> Node:
        return self.call(_exit_inference_mode, entered)

    def done(self, output: Any) -> GraphModule:
        self.graph.output(output)
        self.graph.lint()
        return GraphModule(self.root, self.graph)


def operators(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def in_turn(labels: Sequence[Hashable]) -> Label:
    """A label function that gives out `labels` one after another, as a stateful counter does; the last one stays."""
    given = iter(labels)
    last: list[Hashable] = [0]

    def label(node: Node) -> Hashable:
        last[0] = next(given, last[0])
        return last[0]

    return label


def every(count: int) -> Label:
    """A counter: a new part after every `count` operators."""
    asked = [0]

    def label(node: Node) -> int:
        asked[0] += 1
        return (asked[0] - 1) // count

    return label


def by_name(labels: Mapping[str, Hashable], rest: Hashable = 0) -> Label:
    return lambda node: labels.get(node.name, rest)


def _compat(module: GraphModule, label: Label) -> GraphModule:
    return split_module(module, None, label)  # type: ignore[arg-type]


def _original_order(module: GraphModule, label: Label) -> GraphModule:
    return split_module(module, None, label, keep_original_order=True)  # type: ignore[arg-type]


def _names_and_tuples(module: GraphModule, label: Label) -> GraphModule:
    return split_module(module, None, label, None, False, True, tuple_return=True)  # type: ignore[arg-type]


def _simple(module: GraphModule, label: Label) -> GraphModule:
    return split_module_simple(module, {node: label(node) for node in operators(module)})  # type: ignore[misc]


def _native(module: GraphModule, label: Label) -> GraphModule:
    program = partita.Program.of(module)
    return partita.plan(program, ByLabel(label), Call()).apply().module()


#: Every way to cut a graph by labels; what is right for one is right for all.
CUTS: dict[str, Cut] = {
    "split_module": _compat,
    "original_order": _original_order,
    "names_and_tuples": _names_and_tuples,
    "simple": _simple,
    "native": _native,
}


def parts(module: GraphModule) -> dict[str, GraphModule]:
    """The parts of a cut module in the order of their calls."""
    named = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
    return {name: module.get_submodule(name) for name in named}  # type: ignore[misc]


def dump(module: GraphModule) -> list[object]:
    """Everything that a split must not change in its input: nodes, metadata, attributes, state and hooks."""
    nodes = [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            str(node.type),
            [user.name for user in node.users],
            sorted(vars(node)) if hasattr(node, "__dict__") else [],
            _frozen(node.meta),
        )
        for node in module.graph.nodes
    ]
    state = [
        (name, type(value).__name__, id(value), getattr(value, "_version", None))
        for name, value in [*module.named_parameters(), *module.named_buffers(), *module.named_modules()]
    ]
    graph = module.graph
    tables = [id(graph._codegen), graph._len, sorted(graph._graph_namespace._used_names)]
    return [nodes, state, tables, sorted(vars(module)), _frozen(module.meta), module.training, module.code]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return [(str(key), _frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return value if isinstance(value, int | str | float | None) else (type(value).__name__, id(value))


def same(left: Any, right: Any) -> bool:
    """Bitwise equality of nested results, types and structure included."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.requires_grad == right.requires_grad
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    return bool(left == right)


def crossing_types(module: GraphModule, *args: Any) -> set[type]:
    """The types of all values that cross a border of a part while `module` runs."""
    found: set[type] = set()

    class Watching(torch.fx.Interpreter):
        def call_module(self, target: Any, arguments: Any, named: Any) -> Any:
            given = super().call_module(target, arguments, named)
            found.update(map(type, [*arguments, *(given if isinstance(given, tuple) else (given,))]))
            return given

    Watching(module).run(*args)
    return found


def ambient() -> tuple[object, ...]:
    """The modes of this thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


GETITEM = operator.getitem
