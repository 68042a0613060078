"""Assembly: a module around a new graph that is called like the one around the old, or the old graph made like it."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch.fx import Graph, GraphModule, Node

from partita._torch.lazy_modules import LazyModule, lazy_module
from partita._torch.nodes import copy_meta, map_nodes
from partita.rewrite.state import adopt_hooks, share_plain_attributes

__all__ = ["module_like", "rewrite_in_place"]


def module_like(root: GraphModule, graph: Graph, *, restores_modes: bool = False) -> LazyModule:
    """A module without state that runs `graph` by the calling convention, hooks and flags of `root`."""
    # The code generator carries the calling convention; a copy, so that neither graph can change the other's.
    graph.set_codegen(copy.copy(root.graph._codegen))
    module = lazy_module(graph, training=root.training, restores_modes=restores_modes)
    copy_meta(root.meta, module.meta, {})
    module.shape_env = getattr(root, "shape_env", None)
    type(module).__name__ = type(root).__name__
    adopt_hooks(root, module)
    share_plain_attributes(root, module)
    return module


def rewrite_in_place(graph: Graph, wanted: Graph, *, kept: Collection[Node]) -> None:
    """Makes `graph` like `wanted`: nodes of it that are `kept` stay the same objects, found by name; others go.

    Nodes of `wanted` that call what no kept node of that name calls are made anew. Nothing here can fail: `wanted` is a
    graph that was linted.
    """
    by_name = {node.name: node for node in kept}
    output, env = graph.output_node(), dict[Node, Node]()
    metas: dict[int, object] = {}
    for node in wanted.nodes:
        args, kwargs = (map_nodes(given, env.__getitem__) for given in (node.args, node.kwargs))
        old = output if node.op == "output" else by_name.get(node.name)
        if old is not None and (old.op, old.target) == (node.op, node.target):
            if old is not output:
                output.prepend(old)
            old.args, old.kwargs = args, kwargs
        else:
            with graph.inserting_before(output):
                old = graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
            copy_meta(node.meta, old.meta, metas)
        env[node] = old
    stays = frozenset(env.values())
    for node in reversed(list(graph.nodes)):
        if node not in stays:
            graph.erase_node(node)
    for node, old in env.items():
        old.name = node.name  # Distinct there, so distinct here, now that the nodes are gone which had the names.
