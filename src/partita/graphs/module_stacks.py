"""Module stacks: where in the model a traced node belongs, as torch.export writes it down."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch.fx import Graph, Node

__all__ = ["ModuleStack", "common_stack", "outermost_stack", "settle_stacks"]

#: The calls of modules around a node, the outermost first, by a key of the call: path and type of the module.
ModuleStack: TypeAlias = dict[str, Any]

_KEY = "nn_module_stack"


def common_stack(nodes: Iterable[Node]) -> ModuleStack:
    """The calls of modules that all of these nodes are in; inputs belong where they come from."""
    common: list[tuple[str, Any]] | None = None
    for node in nodes:
        stack = node.meta.get(_KEY) if node.op not in ("placeholder", "output") else None
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


def settle_stacks(graph: Graph) -> None:
    """Keeps the nodes of each call of a module in one run, as `torch.export.unflatten` takes for granted.

    A node that would go back into a call which has ended stays in the call around it; an item goes with its source.
    """
    # A call has a number of its own inside of each other: stacks as a whole would take memory like their depth squared.
    numbers: dict[tuple[int, tuple[str, Any]], int] = {}
    current: list[int] = []
    ended: set[int] = set()
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        stack = (source if isinstance(source, Node) else node).meta.get(_KEY) or node.meta.get(_KEY)
        if not stack or node.op in ("placeholder", "output"):
            continue
        calls = tuple(stack.items())
        if calls[0][1][0] != "":  # What torch adds to a graph belongs wherever it stands.
            continue
        running, number = list[int](), 0
        for call in calls:
            number = numbers.setdefault((number, call), len(numbers) + 1)
            if number in ended:
                break
            running.append(number)
        ended.update(set(current).difference(running))
        current = running
        node.meta[_KEY] = dict(calls[: len(running)])
