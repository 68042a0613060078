"""Module stacks: where in the model a traced node belongs, as torch.export writes it down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch.fx import Graph, Node

__all__ = ["ModuleStack", "common_stack", "outermost_stack"]

#: The calls of modules around a node, the outermost first, by a key of the call: path and type of the module.
ModuleStack: TypeAlias = dict[str, Any]

_KEY = "nn_module_stack"


def common_stack(nodes: Iterable[Node]) -> ModuleStack:
    """The calls of modules that all of these nodes are in."""
    common: list[tuple[str, Any]] | None = None
    for node in nodes:
        stack = node.meta.get(_KEY)
        if not stack:
            continue
        if common is None:
            common = list(stack.items())
        shared = 0
        for ours, theirs in zip(common, stack.items(), strict=False):
            if ours != theirs:
                break
            shared += 1
        common = common[:shared]
    return dict(common or ())


def outermost_stack(graph: Graph) -> ModuleStack:
    """The call of the whole model, for nodes that belong to no module in it."""
    found: ModuleStack = next((stack for node in graph.nodes if (stack := node.meta.get(_KEY))), {})
    return dict(list(found.items())[:1])
