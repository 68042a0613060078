"""The index: nodes as numbers, edges as arrays, and broken graphs refused in words."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from tests.helpers.core import program_of
from torch import nn
from torch.fx import Graph

from partita.analysis.index import Index
from partita.errors import BrokenGraphError
from partita.testing import Case, programs


def diamond() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    left = graph.call_function(torch.sin, (x,))
    right = graph.call_function(torch.add, (left, x), {"alpha": left})
    graph.output((right, [left, {"again": right}]))
    return graph


def test_numbers_are_places_in_graph_order() -> None:
    graph = diamond()
    index = Index(graph)
    assert len(index) == 4
    assert [index.number[node] for node in graph.nodes] == [0, 1, 2, 3]


def test_a_node_that_is_read_twice_gives_one_edge_in_order_of_mention() -> None:
    index = Index(diamond())
    assert [list(index.inputs(number)) for number in range(4)] == [[], [0], [1, 0], [2, 1]]
    assert list(index.edges()) == [(0, 1), (1, 2), (0, 2), (2, 3), (1, 3)]


def test_nodes_inside_slices_and_nested_containers_are_edges() -> None:
    graph = Graph()
    x, start, stop = (graph.placeholder(name) for name in ("x", "start", "stop"))
    part = graph.call_function(operator.getitem, (x, (slice(start, stop), None)))
    graph.output({"part": [part]})
    index = Index(graph)
    assert list(index.inputs(3)) == [0, 1, 2]
    assert list(index.inputs(4)) == [3]


@given(programs())
def test_edges_are_those_that_the_nodes_tell(case: Case) -> None:
    graph = case.graph_module.graph
    index = Index(graph)
    for number, node in enumerate(graph.nodes):
        assert [index.nodes[read] for read in index.inputs(number)] == node.all_input_nodes
    told = [(index.number[read], index.number[node]) for node in graph.nodes for read in node.all_input_nodes]
    assert list(index.edges()) == told


def test_a_node_read_from_another_graph_is_named() -> None:
    other = Graph()
    stray = other.placeholder("stray")
    graph = Graph()
    x = graph.placeholder("x")
    added = graph.call_function(torch.add, (x, x))
    graph.output(added)
    added._update_args_kwargs((x, stray), {})
    with pytest.raises(BrokenGraphError, match="'add' reads 'stray', which is not in this graph"):
        Index(graph)


@pytest.mark.parametrize("away", [1, 1_000])
def test_a_node_that_is_read_too_early_is_named_however_far_away_it_is(away: int) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    early = graph.call_function(torch.add, (x, x))
    late = [graph.call_function(torch.sin, (x,)) for _ in range(away)][-1]
    graph.output(early)
    early._update_args_kwargs((x, late), {})
    with pytest.raises(BrokenGraphError, match=f"'add' reads '{late.name}' before it is computed"):
        Index(graph)


def test_an_erased_node_that_is_still_read_is_named() -> None:
    graph = diamond()
    sin, add = list(graph.nodes)[1:3]
    add._update_args_kwargs((sin, sin), {})
    graph.output_node()._update_args_kwargs((add,), {})
    sin._remove_from_list()
    with pytest.raises(BrokenGraphError, match="'add' reads 'sin'"):
        Index(graph)


def test_a_node_read_before_it_is_computed_is_named() -> None:
    graph = diamond()
    sin, add = list(graph.nodes)[1:3]
    add.append(sin)
    with pytest.raises(BrokenGraphError, match="'add' reads 'sin' before it is computed; move 'sin' up"):
        Index(graph)


def test_a_graph_without_output_is_refused() -> None:
    graph = Graph()
    graph.placeholder("x")
    with pytest.raises(BrokenGraphError, match="does not end in an output node \\(it ends in 'x'\\)"):
        Index(graph)
    with pytest.raises(BrokenGraphError, match="it ends in 'nothing'"):
        Index(Graph())


def test_nodes_after_the_output_are_refused() -> None:
    graph = diamond()
    late = graph.call_function(torch.sin, (next(iter(graph.nodes)),))
    with pytest.raises(BrokenGraphError, match=f"it ends in '{late.name}'"):
        Index(graph)


def test_two_outputs_are_refused() -> None:
    graph = diamond()
    graph.create_node("output", "output", (next(iter(graph.nodes)),))
    with pytest.raises(BrokenGraphError, match="2 output nodes, 'output', 'output_1'"):
        Index(graph)


def test_a_program_keeps_its_index() -> None:
    program = program_of(nn.Linear(2, 2))
    assert program.index is program.index
