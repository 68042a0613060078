"""Scalars: nodes of a body that compute a Python number from sizes and other numbers alone."""

from __future__ import annotations

import builtins
import math
import operator

import torch
from torch.fx import Graph, Node

__all__ = ["scalars_in"]


def scalars_in(graph: Graph) -> set[Node]:
    """The nodes that give numbers; one of which that is unknown is not among them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _reads_number(node) or (_computes(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _reads_number(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    return (node.target is getattr and node.args[1] in ("shape", "ndim", "itemsize")) or node.target in _FUNCTIONS


def _computes(node: Node) -> bool:
    """Whether the function makes numbers of numbers; of nothing at all it may make anything."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    target = node.target
    return getattr(target, "__module__", None) in _MODULES or target in _SYMBOLIC_FUNCTIONS


_METHODS = frozenset(
    ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "item", "__len__")
)
_FUNCTIONS = (
    builtins.len,
    torch.numel,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)
_MODULES = frozenset((operator.add.__module__, math.sqrt.__module__, builtins.int.__module__))
_SYMBOLIC_FUNCTIONS = tuple(
    getattr(torch, name) for name in ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sqrt")
    if hasattr(torch, name)
)  # fmt: skip
