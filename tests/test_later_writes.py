"""Later writes: who writes to the memory of a region's values, in the graph as it was when its program was made."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from partita import Program
from partita.graphs.later_writes import later_writer, names_written, names_written_outside, writers_of, writing_nodes


def test_a_new_program_of_an_edited_graph_sees_the_edit() -> None:
    """As many nodes as before, and the last one writes now."""
    graph = Graph()
    x = graph.placeholder("x")
    square = graph.call_function(torch.mul, (x, x))
    times = graph.call_method("mul", (square, 3))
    graph.output(times)
    module = GraphModule(nn.Module(), graph)
    Program.of(module)
    assert names_written_outside([square]) == names_written([square]) == writers_of(square) == frozenset()
    assert (later_writer(x, [square]), writing_nodes(module)) == (None, ())
    times.target = "mul_"
    Program.of(module)
    assert names_written_outside([square]) == names_written([square]) == {square.name}
    assert writers_of(square) == {times.name}
    assert writing_nodes(module) == (times.name,)
    times.args = (x, 3)
    Program.of(module)
    assert names_written_outside([square]) == frozenset()
    assert later_writer(x, [square]) == times.name
