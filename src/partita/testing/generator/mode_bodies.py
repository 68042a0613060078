"""Bodies that switch modes themselves, for operators that run one: branches, wraps, and a body in a body.

They are of our own class, since torch's graph modules are retraced when they are loaded, and lose their toggles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.fx import Graph, GraphModule, Node

from partita import hops
from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)


def _body(write: Callable[[Graph, Node], Node], **modules: GraphModule) -> GraphModule:
    """A body that takes a matrix and returns one in a tuple; the graph can only be checked with its modules."""
    graph = Graph()
    graph.output((write(graph, graph.placeholder("x")),))
    body = lazy_module(graph, training=True)
    for name, module in modules.items():
        body.add_module(name, module)
    return body


def _without_gradients(graph: Graph, x: Node) -> Node:
    """A block without gradients that restores the grad mode."""
    found = graph.call_function(IS_GRAD_ENABLED)
    graph.call_function(SET_GRAD, (False,))
    factor = graph.call_function(torch.cos, (x,))
    graph.call_function(SET_GRAD, (found,))
    return graph.call_function(torch.mul, (x, factor))


def _casting(graph: Graph, x: Node) -> Node:
    """A block of products under autocast."""
    block = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16))
    product = _product(graph, x)
    graph.call_function(EXIT_AUTOCAST, (block,))
    return graph.call_function(torch.add, (x, product))


def _mixed(graph: Graph, x: Node) -> Node:
    """Autocast around no_grad around a block without autocast, and gradients enabled inside."""
    outer = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.float16, True, False))
    found = graph.call_function(IS_GRAD_ENABLED)
    graph.call_function(SET_GRAD, (False,))
    first = _product(graph, x)
    inner = graph.call_function(ENTER_AUTOCAST, ("cpu", None, False))
    second = _product(graph, x)
    graph.call_function(SET_GRAD, (True,))
    third = _product(graph, x)
    graph.call_function(EXIT_AUTOCAST, (inner,))
    graph.call_function(SET_GRAD, (found,))
    graph.call_function(EXIT_AUTOCAST, (outer,))
    both = graph.call_function(torch.add, (first, second))
    return graph.call_function(torch.add, (both, third))


def _inferring(graph: Graph, x: Node) -> Node:
    """An inference block."""
    block = graph.call_function(ENTER_INFERENCE, (True,))
    factor = graph.call_function(torch.sin, (x,))
    graph.call_function(EXIT_INFERENCE, (block,))
    return graph.call_function(torch.mul, (x, graph.call_method("clone", (factor,))))


def _nesting(graph: Graph, x: Node) -> Node:
    """A body that runs another one in a block of its own."""
    found = graph.call_function(IS_GRAD_ENABLED)
    graph.call_function(SET_GRAD, (False,))
    inner = graph.call_function(hops.wrap, (graph.get_attr("inner"), x))
    graph.call_function(SET_GRAD, (found,))
    return graph.call_function(torch.add, (x, graph.call_function(operator.getitem, (inner, 0))))


def _enabling_gradients(graph: Graph, x: Node) -> Node:
    """A block that ends by enabling gradients, whatever the mode was: for callers with gradients."""
    graph.call_function(SET_GRAD, (False,))
    factor = graph.call_function(torch.tanh, (x,))
    graph.call_function(SET_GRAD, (True,))
    return graph.call_function(torch.mul, (x, factor))


def _product(graph: Graph, x: Node) -> Node:
    """An operator that autocast changes, in the shape of `x`."""
    square = graph.call_function(torch.matmul, (x, graph.call_method("t", (x,))))
    return graph.call_function(torch.matmul, (square, x))


#: Each by its name in the state; all of them map a matrix to a matrix.
MODE_BODIES: Mapping[str, Callable[[], GraphModule]] = {
    "off_body": partial(_body, _without_gradients),
    "cast_body": partial(_body, _casting),
    "mixed_body": partial(_body, _mixed),
    "inference_body": partial(_body, _inferring),
    "nest_body": lambda: _body(_nesting, inner=_body(_mixed)),
    "on_body": partial(_body, _enabling_gradients),
}
