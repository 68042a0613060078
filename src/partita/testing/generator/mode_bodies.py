"""Bodies that switch modes themselves, for operators that run one: branches, wraps, and a body in a body.

They are of our own class, since torch's graph modules are traced again when they are loaded, and lose their toggles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

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

__all__ = ["MODE_BODIES"]


def without_gradients() -> GraphModule:
    """A block without gradients that puts back what it found."""

    def write(graph: Graph, x: Node) -> Node:
        found = graph.call_function(IS_GRAD_ENABLED)
        graph.call_function(SET_GRAD, (False,))
        factor = graph.call_function(torch.cos, (x,))
        graph.call_function(SET_GRAD, (found,))
        return graph.call_function(torch.mul, (x, factor))

    return _body(write)


def casting() -> GraphModule:
    """A block of products under autocast."""

    def write(graph: Graph, x: Node) -> Node:
        block = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16))
        product = _product(graph, x)
        graph.call_function(EXIT_AUTOCAST, (block,))
        return graph.call_function(torch.add, (x, product))

    return _body(write)


def mixed() -> GraphModule:
    """Autocast around no_grad around a block without autocast, and gradients switched on inside."""

    def write(graph: Graph, x: Node) -> Node:
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

    return _body(write)


def inferring() -> GraphModule:
    """An inference block."""

    def write(graph: Graph, x: Node) -> Node:
        block = graph.call_function(ENTER_INFERENCE, (True,))
        factor = graph.call_function(torch.sin, (x,))
        graph.call_function(EXIT_INFERENCE, (block,))
        return graph.call_function(torch.mul, (x, graph.call_method("clone", (factor,))))

    return _body(write)


def nesting() -> GraphModule:
    """A body that runs another one in a block of its own."""

    def write(graph: Graph, x: Node) -> Node:
        found = graph.call_function(IS_GRAD_ENABLED)
        graph.call_function(SET_GRAD, (False,))
        inner = graph.call_function(hops.wrap, (graph.get_attr("inner"), x))
        graph.call_function(SET_GRAD, (found,))
        return graph.call_function(torch.add, (x, graph.call_function(operator.getitem, (inner, 0))))

    return _body(write, inner=mixed())


def switching_on() -> GraphModule:
    """A block that closes by switching gradients on, whatever they were: for callers that have them on."""

    def write(graph: Graph, x: Node) -> Node:
        graph.call_function(SET_GRAD, (False,))
        factor = graph.call_function(torch.tanh, (x,))
        graph.call_function(SET_GRAD, (True,))
        return graph.call_function(torch.mul, (x, factor))

    return _body(write)


def _body(write: Callable[[Graph, Node], Node], **modules: GraphModule) -> GraphModule:
    """A body of one matrix that gives one in a tuple; the graph can only be checked once its modules are there."""
    graph = Graph()
    graph.output((write(graph, graph.placeholder("x")),))
    body = lazy_module(graph, training=True)
    for name, module in modules.items():
        body.add_module(name, module)
    return body


def _product(graph: Graph, x: Node) -> Node:
    """What autocast changes, in the shape of `x`."""
    square = graph.call_function(torch.matmul, (x, graph.call_method("t", (x,))))
    return graph.call_function(torch.matmul, (square, x))


#: Each by its name in the state; all of them give a matrix for a matrix.
MODE_BODIES: Mapping[str, Callable[[], GraphModule]] = {
    "off_body": without_gradients,
    "cast_body": casting,
    "mixed_body": mixed,
    "inference_body": inferring,
    "nest_body": nesting,
    "on_body": switching_on,
}
