"""Programs that put back the modes that they found, made from programs that leave some switched."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from partita._torch.ambient import Ambient, read_ambient, restore_autocast
from partita.graphs.mode import Mode as GraphMode
from partita.graphs.program import Program
from partita.testing.case import Case

__all__ = ["putting_back"]


def putting_back(case: Case, caller: GraphMode) -> Program:
    """The program of `case` with two nodes more: it asks for all modes first and restores them in the end."""
    graph = Graph()
    returned = graph.graph_copy(case.graph_module.graph, {})
    graph.output(returned)
    graph.set_codegen(case.graph_module.graph._codegen)
    module = GraphModule(case.graph_module, graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        found = graph.call_function(found_modes)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(put_back, (found,))
    module.recompile()
    return Program(module, pure=(found_modes, put_back), caller=caller)


def found_modes() -> Ambient:
    """The modes now."""
    return read_ambient()


def put_back(found: Ambient) -> None:
    """Sets them again."""
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)
