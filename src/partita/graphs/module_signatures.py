"""Signatures of the model's own modules, which an exported program can keep for those who unflatten it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from partita.graphs.module_stacks import ModuleStack

__all__ = ["fitting_calls"]


def fitting_calls(calls: Sequence[Any], graph: Graph) -> list[Any]:
    """A copy of the calls of modules, without signatures that the graph no longer has a module for.

    A region that holds a border of a module takes away values which its signature names; the program as a whole is
    called as before.
    """
    copied = [replace(call, signature=_copied(call.signature)) for call in calls]
    named = [call for call in copied if call.fqn and call.signature is not None]
    if named:
        place = {node.name: at for at, node in enumerate(graph.nodes)}
        inside = _nodes_by_call(graph)
        for call in named:
            if not _fits(call.signature, inside.get(call.fqn, {}), place):
                call.signature = None
    return copied


def _copied(signature: Any) -> Any:
    """A signature of its own, since torch's passes rename arguments in place."""
    if signature is None:
        return None
    inputs, outputs = list(map(copy.copy, signature.inputs)), list(map(copy.copy, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)


def _nodes_by_call(graph: Graph) -> dict[str, dict[Node, None]]:
    """The nodes of each call of a module; a second call is numbered behind an @."""
    found: dict[str, dict[Node, None]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stack: ModuleStack = node.meta.get("nn_module_stack") or {}
        for key, (path, _) in stack.items():
            _, again, number = key.partition("@")
            found.setdefault(f"{path}@{number}" if again else path, {})[node] = None
    return found


def _fits(signature: Any, inside: Mapping[Node, None], place: Mapping[str, int]) -> bool:
    """Whether these nodes take and give nothing but what a signature names."""
    if not inside:
        return False
    first = place[next(iter(inside)).name]
    inputs, outputs = _names(signature.inputs), _names(signature.outputs)
    read = {node for user in inside for node in user.all_input_nodes if node.op != "placeholder"}
    taken = {node.name for node in read if node not in inside}
    given = {node.name for node in inside for user in node.users if user not in inside}
    are_inputs_known = taken <= inputs and all(place.get(name, first) < first for name in inputs)
    return are_inputs_known and given <= outputs <= place.keys()


def _names(arguments: Sequence[Any]) -> set[str]:
    """The nodes that a signature names; a constant has a value instead."""
    return {argument.name for argument in arguments if not hasattr(argument, "value")}
