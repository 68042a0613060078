"""Graphs to cut, of any number of nodes and without metadata, made through torch's public interface."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["KINDS", "build", "even_labels", "operators"]

_UNARY = (torch.relu, torch.tanh, torch.neg, torch.abs)
_BINARY = (torch.add, torch.sub, torch.minimum, torch.maximum)
_WRITING = (torch.relu_, torch.neg_, torch.tanh_)
_VIEWING = (torch.t, torch.flatten, torch.detach)

#: The arguments of the next nodes of a random graph come from this many nodes back, and 1 in 20 from anywhere.
_NEAR = 100


def build(kind: str, nodes: int) -> GraphModule:
    """The graph called `kind` with exactly `nodes` nodes, in a module that has not generated any code."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        graph = Graph()
        graph.output(KINDS[kind](graph, graph.placeholder("x"), nodes - 2))
        # An ordinary GraphModule would spend 25 us a node on code that nothing here runs.
        return _LazyGraphModule(nn.Module(), graph)
    finally:
        if was_enabled:
            gc.enable()


def operators(module: GraphModule) -> list[Node]:
    """The nodes that a split asks about."""
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def even_labels(module: GraphModule, parts: int) -> dict[Node, int]:
    """A part for each operator: `parts` runs of equal length."""
    nodes = operators(module)
    return {node: place * parts // len(nodes) for place, node in enumerate(nodes)}


def _chain(graph: Graph, value: Node, count: int) -> Node:
    for place in range(count):
        value = graph.call_function(_UNARY[place % 4], (value,))
    return value


def _residual(graph: Graph, value: Node, count: int) -> Node:
    skipped = value
    for place in range(count):
        if place % 4 == 3:
            value = skipped = graph.call_function(torch.add, (value, skipped))
        else:
            value = graph.call_function(_UNARY[place % 4], (value,))
    return value


def _blocks(graph: Graph, value: Node, count: int) -> Node:
    """Equal blocks of a hundred nodes, each of which also reads what the first node computed."""
    draw = random.Random(0)
    steps = [(draw.choice(_UNARY), draw.choice(_BINARY), draw.random() < 0.3) for _ in range(98)]
    shared = skipped = value = graph.call_function(torch.relu, (value,))
    for place in range(count - 1):
        inside = place % 100
        if inside == 99:
            value = skipped = graph.call_function(torch.add, (value, skipped))
        elif inside == 98:
            value = graph.call_function(torch.mul, (value, shared))
        else:
            unary, binary, reads_both = steps[inside]
            value = graph.call_function(*((binary, (value, skipped)) if reads_both else (unary, (value,))))
    return value


def _fan_out(graph: Graph, value: Node, count: int) -> Node:
    """Every second node reads the input, those between fold them together one by one."""
    folded = leaf = value
    for place in range(count):
        if place % 2:
            folded = graph.call_function(torch.add, (folded, leaf))
        else:
            leaf = graph.call_function(_UNARY[place % 3], (value,))
    return folded


def _random(graph: Graph, value: Node, count: int) -> Node:
    draw, made = random.Random(0), [value]
    for _ in range(count):
        made.append(graph.call_function(draw.choice(_BINARY), (_drawn(draw, made), _drawn(draw, made))))
    return made[-1]


def _writes(graph: Graph, value: Node, count: int) -> Node:
    """A random graph in which 1 node in 10 writes in place and 1 in 10 gives a view."""
    draw, made = random.Random(0), [graph.call_function(torch.neg, (value,))]
    for _ in range(count - 1):
        chance = draw.random()
        if chance < 0.2:
            functions: tuple[Callable[..., object], ...] = _WRITING if chance < 0.1 else _VIEWING
            made.append(graph.call_function(draw.choice(functions), (_drawn(draw, made),)))
        else:
            made.append(graph.call_function(draw.choice(_UNARY), (_drawn(draw, made),)))
    return made[-1]


def _drawn(draw: random.Random, made: list[Node]) -> Node:
    near = made if draw.random() < 0.05 else made[-_NEAR:]
    return near[draw.randrange(len(near))]


KINDS: dict[str, Callable[[Graph, Node, int], Node]] = {
    "residual": _residual,
    "blocks": _blocks,
    "chain": _chain,
    "fan-out": _fan_out,
    "random": _random,
    "writes": _writes,
}
