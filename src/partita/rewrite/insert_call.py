"""Inserting one call in place: a body is called, and what reads the nodes that it replaces reads the call instead."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch.fx import Graph, GraphModule, Node

from partita.errors import ModeError
from partita.graphs.followers import followers_of
from partita.graphs.modes import has_toggles
from partita.graphs.program import Program, program_being_edited
from partita.rewrite.fused_bodies import values_of_call
from partita.rewrite.state import place

__all__ = ["insert_call"]


def insert_call(
    root: GraphModule,
    body: GraphModule,
    name: str,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    *,
    after: Node,
    is_bare: bool,
) -> Node:
    """The call of `body`, as submodule `name`, behind `after`; others than the replaced nodes read its results.

    The nodes that `outputs` are computed by stay, for whoever erases them. What stands before the call and needs it
    moves behind it, with all that must follow.
    """
    replaced = _computing(outputs, inputs)
    readers = {node: [user for user in node.users if user not in replaced] for node in outputs}
    after = max((after, *inputs))
    early = [user for users in readers.values() for user in users if user < after]
    moving = _with_followers(root, early, after, replaced) if early else []
    place(root, name, body)
    graph = root.graph
    with graph.inserting_after(after):
        call = graph.call_module(name, tuple(inputs))
    results = [call] if is_bare else _items(graph, call, len(outputs))
    for node, result in zip(outputs, results, strict=True):
        result.meta.update(node.meta)
        others = readers[node]
        node.replace_all_uses_with(result, delete_user_cb=frozenset(others).__contains__)
    if outputs and not is_bare:
        call.meta.update(values_of_call(outputs))
    last = results[-1] if results else call
    for node in reversed(moving):
        last.append(node)
    return call


def _items(graph: Graph, call: Node, count: int) -> list[Node]:
    results: list[Node] = []
    for item in range(count):
        with graph.inserting_after(results[-1] if results else call):
            results.append(graph.call_function(operator.getitem, (call, item)))
    return results


def _computing(outputs: Iterable[Node], inputs: Iterable[Node]) -> set[Node]:
    """The nodes by which `outputs` are computed from `inputs`."""
    given, found, waiting = set(inputs), set[Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in given and node not in found and node.op != "placeholder":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _with_followers(root: GraphModule, early: Iterable[Node], last: Node, replaced: set[Node]) -> list[Node]:
    """The early nodes and all that must follow them, as far as it stands before `last`; in graph order."""
    program = program_being_edited(root)
    followers = followers_of(program)
    found, waiting = set[Node](), list(early)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in replaced and node < last:
            found.add(node)
            waiting += (*node.users, *followers.get(node, ()))
    moving = sorted(found)
    if has_toggles(root.graph):
        _check_modes(program, moving, last)
    return moving


def _check_modes(program: Program, moving: Iterable[Node], last: Node) -> None:
    modes, number = program.modes, program.index.number
    for node in moving:
        if node.op != "get_attr" and modes.at(number[node]) != modes.at(number[last]):
            raise ModeError(
                f"the call would stand behind {last.name!r}, and {node.name!r}, which reads it, runs in another mode "
                "before that; fuse with `fuse_by_partitions`, which sets the modes anew"
            )
