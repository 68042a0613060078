"""Graphs with modes: a chain of additions with toggles in it, traced values on every node as a capture leaves them."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch._C import _set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node

__all__ = ["build_nest", "build_with_modes"]


def build_with_modes(kind: str, nodes: int, share: float) -> GraphModule:
    """A graph of so many nodes, of which this share are toggles; every block is closed."""
    graph, rng = Graph(), random.Random(0)
    value = torch.empty(4, 4, device="meta")
    written = [graph.placeholder("x")]
    written[0].meta["val"] = value
    block: Node | None = None
    for _ in range(nodes):
        if rng.random() < share:
            block = _toggled(graph, kind, block)
        else:
            node = graph.call_function(torch.ops.aten.add.Tensor, (rng.choice(written[-3:]), written[-1]))
            node.meta["val"] = value
            written.append(node)
    if block is not None:
        _toggled(graph, kind, block)
    graph.output((written[-1],))
    return GraphModule(nn.Module(), graph)


def build_nest(depth: int) -> GraphModule:
    """A graph of so many autocast blocks, each inside the one before, with two operators in each."""
    graph = Graph()
    value = graph.placeholder("x")
    blocks = []
    for level in range(depth):
        dtype = torch.bfloat16 if level % 2 else torch.float16
        blocks.append(graph.call_function(_enter_autocast, ("cpu", dtype, True, None)))
        value = graph.call_function(torch.ops.aten.sin.default, (value,))
    for block in reversed(blocks):
        value = graph.call_function(torch.ops.aten.cos.default, (value,))
        graph.call_function(_exit_autocast, (block,))
    graph.output((value,))
    return GraphModule(nn.Module(), graph)


def _toggled(graph: Graph, kind: str, block: Node | None) -> Node | None:
    """Leaves the open block, or enters one."""
    if kind == "grad":
        entered = graph.call_function(_set_grad_enabled, (block is not None,))
        return entered if block is None else None
    if block is None:
        return graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_exit_autocast, (block,))
    return None
