"""The inputs of a graph that an inner backend gets: state of the model, or values that change with each call."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.symbolic_shapes import symbols_in
from partita.analysis.nodes import is_module_state, value_of

#: A parameter; another tensor that a module holds; a tensor of fixed or of symbolic sizes; a number.
InputKind: TypeAlias = Literal["parameter", "buffer", "static", "dynamic", "number"]


def input_kinds(body: GraphModule) -> tuple[InputKind, ...]:
    """The kind of each input of a graph that the backend `partita` gives to an inner backend, in order.

    Modules hold parameters and buffers: they are the same tensors in every call unless the user replaces them. The
    other tensors are new ones.
    """
    return tuple(map(_kind, body.graph.find_nodes(op="placeholder")))


def _kind(node: Node) -> InputKind:
    value = value_of(node)
    if is_module_state(node):
        return "parameter" if isinstance(value, nn.Parameter) else "buffer"
    if not isinstance(value, Tensor):
        return "number"
    return "dynamic" if symbols_in(value) else "static"
