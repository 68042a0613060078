"""What the tests of fusing share: descriptions to compare with torch's results, and supports made of functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase


class Supported(OperatorSupportBase):
    """A support that asks a function about every node."""

    def __init__(self, function: Callable[[Node], bool]) -> None:
        self.function = function

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        return self.function(node)


def calls_but(*names: str) -> Supported:
    """Supports every call but those of these names."""
    return Supported(lambda node: node.op.startswith("call_") and node.name not in names)


def some_names(module: GraphModule, seed: int, share: float) -> set[str]:
    """The names of about this share of the nodes."""
    dice = random.Random(seed)
    return {node.name for node in module.graph.nodes if dice.random() < share}


def fused_modules(module: GraphModule, prefix: str = "fused_") -> dict[str, GraphModule]:
    """The submodules that fusing has made, by name."""
    return {name: child for name, child in module.named_children() if name.startswith(prefix)}  # type: ignore[misc]


def named(module: GraphModule, names: Iterable[str]) -> list[Node]:
    """The nodes of these names, in this order."""
    found = {node.name: node for node in module.graph.nodes}
    return [found[name] for name in names]


def described(module: GraphModule, prefix: str = "fused_") -> dict[str, Any]:
    """What must be the same: names, code, nodes, state, classes and copied metadata; inputs of bodies come first."""
    graphs = {"": module, **fused_modules(module, prefix)}
    return {
        "modules": sorted(name for name, _ in module.named_modules(remove_duplicate=False)),
        "state": sorted(module.state_dict()),
        "classes": {name: type(each).__name__ for name, each in graphs.items() if name},
        "code": {name: each.code for name, each in graphs.items()},
        "nodes": {name: [_line(node) for node in _in_order(each)] for name, each in graphs.items()},
        "values": {name: [_value(node) for node in _in_order(each)] for name, each in graphs.items()},
    }


def _in_order(module: GraphModule) -> list[Node]:
    """The nodes with the inputs first; torch writes the inputs of a body where they are first read."""
    return sorted(module.graph.nodes, key=lambda node: node.op != "placeholder")


def _line(node: Node) -> tuple[Any, ...]:
    return (
        node.op,
        node.name,
        str(node.target),
        str(node.args),
        str(node.kwargs),
        str(node.type),
        node.meta.get("origin"),
    )


def _value(node: Node) -> str:
    """The traced value as text; torch records unknown values as a tuple of None."""
    value = node.meta.get("val")
    unknown = isinstance(value, tuple) and all(item is None for item in value)
    return "None" if unknown else str(value)
