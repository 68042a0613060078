"""Views outside of compiled code: outputs that only look at an input, or at another output, in another way.

A view that plain torch makes has the history, the version counter and the flags that the body's own would have.
AOTAutograd (torch 2.13) makes views anew from what it noted of them, and loses some of that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.lazy_modules import lazy_module
from partita._torch.lowering_containers import leaves_of, shape_of
from partita._torch.nodes import GraphWriter, input_nodes
from partita._torch.schemas import is_higher_order, storage_key

__all__ = ["Reading", "readable_from", "views_module"]

#: A node and the keys by which a leaf is read from what it gives.
Reading: TypeAlias = tuple[Node, tuple[Any, ...]]


def readable_from(
    roots: Sequence[Node], results: Mapping[Node, Any], is_quiet: Callable[[Node], bool]
) -> dict[Node, Node | None]:
    """The nodes whose results are views of `roots`, or computed from their sizes, with the root that a node gives back.

    `results` are those of a run. Nodes that are not quiet do more than compute, so they cannot run a second time.
    """
    given = {id(results[node]): node for node in roots if isinstance(results[node], Tensor)}
    memory = {storage_key(results[node]) for node in given.values()}
    found: dict[Node, Node | None] = dict.fromkeys(roots)
    for node, value in results.items():
        same = given.get(id(value))
        if node in found or node.op in ("placeholder", "output"):
            continue
        if same is not None:
            found[node] = same
        elif (
            node.op in ("call_function", "call_method")
            and is_quiet(node)
            and not is_higher_order(node.target)
            and all(read in found for read in input_nodes(node))
            and _is_in(memory, value)
            and not (isinstance(value, list | dict) and not all(map(is_quiet, node.users)))
        ):
            found[node] = None
    return found


def views_module(
    roots: Sequence[Node], readable: Mapping[Node, Node | None], readings: Sequence[Reading]
) -> GraphModule:
    """A module that gives these leaves, each a view of a root, for the values of the roots."""
    needed = _needed(roots, readable, [node for node, _ in readings])
    writer = GraphWriter()
    writer.names.reserve(node.name for node in needed)
    env: dict[Node, Any] = {root: writer.write("placeholder", root.name, name=root.name) for root in roots}
    for node, same in readable.items():
        if same is not None:
            env[node] = env[same]
        elif node in needed and node not in env:
            env[node] = writer.copy(node, env.__getitem__, name=node.name)
    leaves = []
    for node, keys in readings:
        leaf = env[node]
        for key in keys:
            leaf = writer.write("call_function", operator.getitem, (leaf, key), name=writer.names.fresh("item"))
        leaves.append(leaf)
    writer.write("output", "output", (tuple(leaves),), name=writer.names.fresh("output"))
    return lazy_module(writer.close(), training=False)


def _is_in(memory: set[int], value: Any) -> bool:
    leaves = leaves_of(value, shape_of(value))
    return all(storage_key(leaf) in memory for leaf in leaves if isinstance(leaf, Tensor))


def _needed(roots: Sequence[Node], readable: Mapping[Node, Node | None], wanted: Sequence[Node]) -> set[Node]:
    """The nodes between the roots and those that are wanted."""
    found: set[Node] = set(roots)
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if readable[node] is None:
                waiting += input_nodes(node)
    return found
