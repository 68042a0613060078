"""Modules for generated programs: leaves with effects of their own, and graph modules to call and to pass on."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.lazy_modules import lazy_module
from partita._torch.toggles import SET_GRAD

__all__ = ["Fork", "Meter", "grad_enabling_body", "nested_module", "pure_body", "replacing_body", "writing_body"]


class Meter(nn.Module):
    """Returns its input scaled by a running total, which every call updates."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.mul_(0.5).add_(x.detach().mean().tanh())
        return x * self.total.clone()


class Fork(nn.Module):
    """Returns a tuple and a dict in one tuple."""

    def forward(self, x: Tensor, *, scale: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
        return x * scale, {"left": x.sin(), "right": x.cos()}


def nested_module() -> GraphModule:
    """A graph module with a parameter, an in-place operator and a random draw."""
    root = nn.Module()
    root.linear = nn.Linear(6, 6)
    root.dropout = nn.Dropout(0.25)
    graph = Graph()
    hidden = graph.call_module("linear", (graph.placeholder("x"),))
    hidden = graph.call_method("add_", (hidden, 0.5))
    hidden = graph.call_module("dropout", (hidden,))
    graph.output(graph.call_function(torch.tanh, (hidden,)))
    return GraphModule(root, graph)


def pure_body() -> GraphModule:
    """A body for a higher-order operator: one operand, two results."""
    graph = Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.output((sine, graph.call_function(torch.ops.aten.mul.Tensor, (sine, x))))
    return GraphModule(nn.Module(), graph)


def writing_body() -> GraphModule:
    """A body that writes to its operand."""
    graph = Graph()
    x = graph.placeholder("x")
    written = graph.call_function(torch.ops.aten.mul_.Tensor, (x, 0.5))
    graph.output((graph.call_function(torch.ops.aten.cos.default, (written,)),))
    return GraphModule(nn.Module(), graph)


def replacing_body() -> GraphModule:
    """A body that replaces the first item of a list."""
    graph = Graph()
    graph.call_function(operator.setitem, (graph.placeholder("pieces"), 0, graph.placeholder("x")))
    graph.output(None)
    # Of our own class: torch's graph modules are traced again when they are loaded, where a list cannot be written.
    return lazy_module(graph, training=True)


def grad_enabling_body() -> GraphModule:
    """A body that closes a block without gradients by switching them on, whatever they were when it was called.

    It is of our own class, since torch's graph modules are traced again when they are loaded, and lose their toggles.
    """
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,))
    factor = graph.call_function(torch.cos, (x,))
    graph.call_function(SET_GRAD, (True,))
    graph.output(graph.call_function(torch.mul, (x, factor)))
    return lazy_module(graph, training=True)
