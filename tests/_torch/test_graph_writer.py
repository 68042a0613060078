"""Nodes that the writer writes are the nodes that `Graph.create_node` makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from partita._torch.fx import graph_writer as nodes
from partita._torch.fx.graph_writer import GraphWriter
from partita.testing import Case, programs
from partita.testing.generator.build import dump


@pytest.fixture(params=[True, False], ids=["fast", "public"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways of writing: with torch's own parts, and the one for a torch without them."""
    monkeypatch.setattr(nodes, "_FAST", request.param)
    return bool(request.param)


def written() -> Graph:
    writer = GraphWriter()
    build(lambda *args, **kwargs: writer.write(*args, name=writer.names.fresh_for(args[1]), **kwargs))
    return writer.close()


def created() -> Graph:
    graph = Graph()
    build(graph.create_node)
    return graph


def build(make: Callable[..., Node]) -> None:
    x = make("placeholder", "x", type_expr=torch.Tensor)
    y = make("placeholder", "y", (1.5,))
    total = make("call_function", torch.add, (x, y), {"alpha": 2})
    parts = make("call_function", torch.cat, ([x, total, [y]],), {"options": {"deep": [total]}})
    piece = make("call_function", operator.getitem, (parts, (slice(None, y, 2), ..., None)))
    make("call_method", "mul", (piece, piece))
    make("call_module", "layer.0", (total,))
    make("get_attr", "layer.0.weight")
    make("output", "output", ((x, {"total": total}),))


def facts(graph: Graph) -> list[Any]:
    return [
        (node.op, str(node.target), node.name, str(node.args), str(node.kwargs), node.type, list(map(str, node.users)),
         list(map(str, node.all_input_nodes)), node.meta)
        for node in graph.nodes
    ]  # fmt: skip


def test_written_nodes_are_created_nodes(fast: bool) -> None:
    ours, theirs = written(), created()
    assert facts(ours) == facts(theirs)
    assert len(ours.nodes) == len(theirs.nodes)
    ours.lint()


def test_arguments_cannot_be_changed_in_place(fast: bool) -> None:
    parts = next(node for node in written().nodes if node.name == "cat")
    assert isinstance(parts.args[0], immutable_list)
    assert isinstance(parts.args[0][2], immutable_list)
    assert isinstance(parts.kwargs, immutable_dict)
    assert isinstance(parts.kwargs["options"], immutable_dict)


def test_written_nodes_are_found_in_order(fast: bool) -> None:
    ours, theirs = written(), created()
    for op, target in [("placeholder", None), ("call_function", torch.cat), ("call_method", "mul"), ("output", None)]:
        ours_found = [node.name for node in ours.find_nodes(op=op, target=target)]
        assert ours_found == [node.name for node in theirs.find_nodes(op=op, target=target)]
    in_order = list(ours.nodes)
    assert all(a < b and not b < a for a, b in pairwise(in_order))


def test_a_written_graph_can_be_edited(fast: bool) -> None:
    graph = written()
    output = graph.output_node()
    with graph.inserting_before(output):
        new = graph.call_function(torch.add, (next(iter(graph.nodes)), 1))
    assert new.name == "add_1"
    unused = next(node for node in graph.nodes if node.name == "mul")
    graph.erase_node(unused)
    assert not graph.find_nodes(op="call_method", target="mul")
    assert len(graph.nodes) == len(list(graph.nodes)) == 9
    graph.erase_node(new)
    graph.lint()


def test_a_node_can_move_in_a_written_graph(fast: bool) -> None:
    graph = written()
    weight, total = graph.find_nodes(op="get_attr")[0], graph.find_nodes(op="call_function", target=torch.add)[0]
    total.prepend(weight)
    names = [node.name for node in graph.nodes]
    assert names.index(weight.name) == names.index("add") - 1
    assert weight < total


@given(programs())
@settings(max_examples=40)
def test_a_copied_graph_is_the_graph(case: Case) -> None:
    graph = case.graph_module.graph
    writer = GraphWriter(graph._tracer_cls)
    names = [node.name for node in graph.nodes]
    writer.names.reserve(names)
    env: dict[Node, Any] = {}
    writer.copy_run(graph.nodes, env, names)
    copied = writer.close()
    copied.set_codegen(graph._codegen)
    assert facts_without_meta(copied) == facts_without_meta(graph)
    assert copied.python_code("self").src == graph.python_code("self").src
    assert copied._graph_namespace._used_names >= set(names)


def facts_without_meta(graph: Graph) -> list[Any]:
    return [(*fact[:-1], sorted(fact[-1])) for fact in facts(graph)]


def test_metadata_is_copied_with_its_containers_and_its_sharing() -> None:
    graph = Graph()
    shared = {"inner": [1]}
    for name in "ab":
        graph.placeholder(name).meta["stack"] = shared
    graph.output(None)
    module = GraphModule(nn.Module(), graph)
    before = dump(module)
    writer = GraphWriter()
    a, b = (writer.copy(node, lambda n: n, name=node.name) for node in graph.find_nodes(op="placeholder"))
    assert a.meta["stack"] is b.meta["stack"]
    a.meta["stack"]["inner"].append(2)
    a.meta["more"] = 1
    assert dump(module) == before


def test_two_writers_share_nothing() -> None:
    one, other = GraphWriter(), GraphWriter()
    assert one.names.fresh("x") == other.names.fresh("x") == "x"
