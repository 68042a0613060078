"""Calls of modules in an exported program: it can hold none, so it becomes the module that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.fx import Node

from partita.graphs.program import Program

__all__ = ["calling_modules"]


def calling_modules(program: Program, modules: Mapping[str, nn.Module]) -> Program:
    """The module of an exported program, with calls of these modules where it runs bodies, by the name of the call."""
    graph_module = program.exported().module()
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.name in modules:
            body, *operands = node.args
            assert isinstance(body, Node)
            graph_module.add_module(str(body.target), modules[node.name])
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
            graph.erase_node(body)
    graph_module.recompile()
    return Program(
        graph_module,
        pure=program.pure,
        state_keys=program.state_keys,
        tolerance=program.tolerance,
        caller=program.caller,
    )
