"""The floor: copying every node once, by the shortest route that torch has, and doing nothing else."""

from __future__ import annotations

import gc

from torch._C import _fx_map_arg, _NodeBase
from torch.fx import Graph, Node

__all__ = ["minimal_copy"]


def minimal_copy(graph: Graph) -> Graph:
    """A graph with the same nodes, names and metadata; nobody has looked at what it may do or where it is cut."""
    # Any splitter may pause the collector, which doubles the time of making so many nodes; so may the floor.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _copied(graph)
    finally:
        if was_enabled:
            gc.enable()


def _copied(graph: Graph) -> Graph:
    copy = Graph()
    env: dict[Node, Node] = {}
    swap, put, table = env.__getitem__, copy._root._prepend, copy._find_nodes_lookup_table.table
    for node in graph.nodes:
        op, target, kwargs = node.op, node.target, node._kwargs
        copied = Node.__new__(Node)
        _NodeBase.__init__(copied, copy, node.name, op, target, node.type)
        copied._update_args_kwargs(_fx_map_arg(node._args, swap), _fx_map_arg(kwargs, swap) if kwargs else kwargs)
        if node.meta:
            copied.meta.update(node.meta)
        put(copied)
        table[op, target if op == "call_function" else None][copied] = None
        env[node] = copied
    copy._len = len(env)
    namespace = copy._graph_namespace
    namespace._obj_to_name.update({node: node.name for node in env.values()})
    namespace._used_names.update(node.name for node in env.values())
    return copy
