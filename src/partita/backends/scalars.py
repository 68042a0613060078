"""Scalars: nodes of a body that compute a Python number from sizes and other numbers alone."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

__all__ = ["scalars_in", "scalars_of_inputs"]


def scalars_in(graph: Graph) -> set[Node]:
    """The nodes that give numbers; one of which that is unknown is not among them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if _reads_number(node) or (_computes(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def scalars_of_inputs(body: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What the outputs are that follow from the looks of the inputs alone: their sizes, and numbers made of these."""
    known: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    output, scalars = body.graph.output_node(), scalars_in(body.graph)
    runner = Interpreter(body)
    runner.env = known
    for node in _needed_for([node for node in output.all_input_nodes if node in scalars], body.graph):
        is_known = node.target != "item" and known.keys() >= {*node.all_input_nodes}
        if is_known and (_reads_number(node) or (_computes(node) and not _has_tensors(node, known))):
            try:
                known[node] = runner.run_node(node)
            except Exception:
                continue  # Whoever runs the body will say what is wrong.
    return {node: known[node] for node in output.all_input_nodes if node in known and node.op != "placeholder"}


def _needed_for(nodes: Sequence[Node], graph: Graph) -> list[Node]:
    """The nodes and all that they are computed of, in graph order; no inputs."""
    needed = set(nodes)
    for node in reversed(graph.nodes) if needed else ():
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and node.op != "placeholder"]


def _has_tensors(node: Node, known: Mapping[Node, Any]) -> bool:
    return any(isinstance(known.get(read), Tensor) for read in node.all_input_nodes)


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
