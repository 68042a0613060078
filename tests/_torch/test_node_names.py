"""Names are those that torch would have given, whatever the order of targets and wishes."""

from __future__ import annotations

import builtins
import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph
from torch.fx.graph import _illegal_names

from partita._torch.fx.graph_writer import NAMES_OF_CODE, Names

TARGETS: list[Any] = [
    torch.add,
    operator.add,
    operator.getitem,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.add_.Tensor,
    torch._C._set_grad_enabled,
    torch.nn.functional.relu,
    len,
    "add",
    "add_1",
    "__add__",
    "layers.0.conv1",
    "layers.0",
    "0.weight",
    "relu_2",
    "Upper.CamelCase",
]
WISHES = [
    "add",
    "add_1",
    "add_01",
    "add_1_1",
    "x",
    "x_2",
    "print",
    "float",
    "device",
    "1x",
    "a.b-c",
    "",
    "é",
    "_1",
]

steps = st.one_of(
    st.tuples(st.just("target"), st.sampled_from(TARGETS)),
    st.tuples(st.just("wish"), st.sampled_from(WISHES) | st.text(alphabet="ab_01.", max_size=4)),
)


def torchs_name(graph: Graph, kind: str, value: Any) -> str:
    """The name of the node that `Graph.create_node` makes."""
    if kind == "wish":
        return graph.create_node("call_function", torch.sin, (), name=value).name if value else _unnamed(graph)
    op = "call_method" if isinstance(value, str) else "call_function"
    return graph.create_node(op, value).name


def _unnamed(graph: Graph) -> str:
    return graph._graph_namespace.create_name("", None)


@given(st.lists(steps, max_size=30))
@settings(max_examples=200)
def test_names_are_those_that_torch_would_give(sequence: list[tuple[str, Any]]) -> None:
    theirs = Graph()
    names = Names(Graph())
    ours = [names.fresh(value) if kind == "wish" else names.fresh_for(value) for kind, value in sequence]
    assert ours == [torchs_name(theirs, kind, value) for kind, value in sequence]


@given(st.lists(steps, max_size=12), st.lists(steps, max_size=12))
@settings(max_examples=200)
def test_torch_goes_on_where_names_stopped(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    graph, theirs = Graph(), Graph()
    names = Names(graph)
    for kind, value in before:
        assert (names.fresh(value) if kind == "wish" else names.fresh_for(value)) == torchs_name(theirs, kind, value)
    for kind, value in after:
        assert torchs_name(graph, kind, value) == torchs_name(theirs, kind, value)


@given(st.sets(st.sampled_from(["add", "add_1", "add_2", "add_7", "x"])), st.lists(steps, max_size=20))
def test_a_reserved_name_is_not_used(reserved: set[str], sequence: list[tuple[str, Any]]) -> None:
    names = Names(Graph())
    names.reserve(sorted(reserved))
    given_out = [names.fresh(value) if kind == "wish" else names.fresh_for(value) for kind, value in sequence]
    assert len({*given_out, *reserved}) == len(given_out) + len(reserved)


def test_names_that_stand_for_something_else_are_those_of_torch() -> None:
    assert NAMES_OF_CODE - set(vars(builtins)) == set(_illegal_names) - set(vars(builtins))
