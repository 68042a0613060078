"""Bugs that once gave wrong numbers or unseen effects, each as a small program that stays right."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.core import cut
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita import Program
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from partita.errors import ModeError

Build = Callable[[Graph, Node], Any]


def made(build: Build, root: nn.Module | None = None) -> Program:
    """The program that `build` writes into a graph with one input, `x`, and returns the result of."""
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return Program.of(GraphModule(root or nn.Module(), graph))


def orders(program: Program, before: str, after: str) -> bool:
    """Whether the named nodes must stay in this order."""
    nodes = program.index.nodes
    return (before, after) in {(nodes[one].name, nodes[other].name) for one, other in program.effects.edges()}


def written_through(alias: Callable[[Graph, Node], Node]) -> Program:
    """A copy is read, then written through what `alias` makes of it."""

    def build(graph: Graph, x: Node) -> Node:
        copied = graph.call_function(torch.clone, (x,), name="copied")
        alias_of_it = alias(graph, copied)
        read = graph.call_function(torch.mul, (copied, 2), name="read")
        graph.call_method("add_", (alias_of_it, 1)).name = "write"
        return read

    return made(build)


@pytest.mark.parametrize(
    "alias",
    [
        lambda graph, base: graph.call_function(torch.flatten, (), {"input": base}),
        lambda graph, base: graph.call_function(torch.transpose, (), {"input": base, "dim0": 0, "dim1": 0}),
        lambda graph, base: graph.call_function(operator.pos, (base,)),
        lambda graph, base: graph.call_method("__pos__", (base,)),
    ],
    ids=["flatten by keyword", "transpose by keyword", "operator.pos", "__pos__"],
)  # B1, B2
def test_a_view_made_in_an_odd_way_is_a_view(alias: Callable[[Graph, Node], Node]) -> None:
    program = written_through(alias)
    assert orders(program, "read", program.index.nodes[-2].name)


def test_a_write_to_a_tensor_passed_by_keyword_is_seen() -> None:  # B1
    def build(graph: Graph, x: Node) -> Node:
        read = graph.call_function(torch.mul, (x, 2), name="read")
        graph.call_function(torch.relu_, (), {"input": x}, name="write")
        return read

    after = cut(made(build), {"write": 0, "read": 1})
    assert after.module()(torch.tensor([-1.0, 2.0])).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(("join", "key"), [(operator.add, 0), (operator.or_, "k")])  # B2
def test_what_is_put_together_holds_the_items_of_both(join: Callable[..., Any], key: int | str) -> None:
    def build(graph: Graph, x: Node) -> Node:
        both = graph.call_function(join, (x, graph.placeholder("y")))
        graph.call_method("add_", (graph.call_function(operator.getitem, (both, key)), 1)).name = "write"
        return graph.call_function(torch.mul, (graph.call_function(operator.getitem, (x, key)), 2), name="read")

    program = made(build)
    write = next(node.name for node in program.index.nodes if node.target == "add_")
    assert orders(program, write, "read")


def test_a_body_that_leaves_a_mode_behind_is_refused() -> None:  # B3
    inner = Graph()
    inner.placeholder("x")
    inner.call_function(SET_GRAD, (False,))
    inner.output(None)
    root = nn.Module()
    root.leaky = GraphModule(nn.Module(), inner)

    def build(graph: Graph, x: Node) -> tuple[Node, Node]:
        before = graph.call_function(torch.mul, (x, 2), name="before")
        graph.call_module("leaky", (x,))
        after = graph.call_function(torch.mul, (x, 3), name="after")
        graph.call_function(SET_GRAD, (True,))
        return before, after

    with pytest.raises(ModeError, match="'leaky'"):
        cut(made(build, root), {"before": 1, "leaky": 0, "after": 2})


def test_an_item_is_taken_after_it_was_replaced() -> None:  # B4
    def build(graph: Graph, x: Node) -> Node:
        pieces = graph.call_function(torch.ops.aten.split.Tensor, (x, 2), name="pieces")
        other = graph.call_function(torch.neg, (x,), name="other")
        graph.call_function(operator.setitem, (pieces, 0, other), name="replace")
        item = graph.call_function(operator.getitem, (pieces, 0), name="item")
        return graph.call_function(torch.mul, (item, 1), name="result")

    after = cut(made(build), {"pieces": 0, "other": 1, "replace": 1, "item": 2, "result": 2})
    assert after.module()(torch.ones(2)).tolist() == [-1.0, -1.0]


def replace_first(pieces: list[Tensor], other: Tensor) -> None:
    pieces[0] = other


def replacing_body() -> GraphModule:
    graph = Graph()
    graph.call_function(operator.setitem, (graph.placeholder("pieces"), 0, graph.placeholder("other")))
    graph.output(None)
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("by_body", [True, False], ids=["a body", "an unknown function"])  # B4
def test_an_item_is_taken_after_another_call_replaced_it(by_body: bool) -> None:
    root = nn.Module()
    root.body = replacing_body()

    def build(graph: Graph, x: Node) -> Node:
        pieces = graph.call_function(torch.ops.aten.split.Tensor, (x, 2), name="pieces")
        arguments = (pieces, graph.call_function(torch.neg, (x,), name="other"))
        graph.call_module("body", arguments) if by_body else graph.call_function(replace_first, arguments)
        item = graph.call_function(operator.getitem, (pieces, 0), name="item")
        return graph.call_function(torch.mul, (item, 1), name="result")

    after = cut(made(build, root), {"pieces": 0, "other": 1, "body": 1, "replace_first": 1, "item": 2, "result": 2})
    assert after.module()(torch.ones(2)).tolist() == [-1.0, -1.0]


@functools.lru_cache
def log(x: Tensor) -> Tensor:
    return x.add_(1)


class Mine:
    @staticmethod
    def add(x: Tensor) -> Tensor:
        return x.add_(1)


Mine.add.__qualname__ = "Tensor.add"


@pytest.mark.parametrize("function", [log, Mine.add], ids=["lru_cache", "a class called Tensor"])  # B5
def test_a_function_is_not_taken_for_a_method_of_its_name(function: Callable[..., Any]) -> None:
    def build(graph: Graph, x: Node) -> Node:
        copied = graph.call_function(torch.clone, (x,))
        graph.call_function(function, (copied,), name="write")
        return graph.call_function(torch.mul, (copied, 2), name="read")

    assert orders(made(build), "write", "read")


def with_own_forward(body: GraphModule) -> None:
    body.forward = lambda x: x.add_(1)


def with_backward_hook(body: GraphModule) -> None:
    body.register_full_backward_hook(lambda module, before, after: None)


@pytest.mark.parametrize("change", [with_own_forward, with_backward_hook])  # B6
def test_a_body_that_does_not_run_its_graph_is_unknown(change: Callable[[GraphModule], None]) -> None:
    root = nn.Module()
    root.body = made(lambda graph, x: graph.call_function(torch.neg, (x,))).graph_module
    change(root.body)

    def build(graph: Graph, x: Node) -> Node:
        copied = graph.call_function(torch.clone, (x,))
        graph.call_module("body", (copied,))
        return graph.call_function(torch.mul, (copied, 2), name="read")

    assert orders(made(build, root), "body", "read")


@torch.library.custom_op("partita_regressions::noise_", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def noise_(x: Tensor) -> None:
    x.add_(torch.rand_like(x))


def test_a_functionalized_random_operator_stays_in_order() -> None:  # B7
    target = torch.ops.partita_regressions.noise_.default

    def build(graph: Graph, x: Node) -> tuple[Node, Node]:
        functionalized = torch.ops.higher_order.auto_functionalized
        first = graph.call_function(functionalized, (target,), {"x": x}, name="first")
        second = graph.call_function(torch.rand_like, (x,), name="second")
        return graph.call_function(operator.getitem, (first, 1)), second

    assert orders(made(build), "first", "second")


def test_a_nested_block_leaves_the_mode_as_it_was() -> None:  # B13
    def build(graph: Graph, x: Node) -> Node:
        outer = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        other = graph.call_function(ENTER_AUTOCAST, ("xpu", torch.float16, True, None))
        x = graph.call_function(torch.mul, (x, 2), name="before")
        inner = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.float16, True, None))
        graph.call_function(EXIT_AUTOCAST, (inner,))
        x = graph.call_function(torch.mul, (x, 2), name="after")
        graph.call_function(EXIT_AUTOCAST, (other,))
        graph.call_function(EXIT_AUTOCAST, (outer,))
        return x

    program = made(build)
    modes = {node.name: program.modes.at(number) for number, node in enumerate(program.index.nodes)}
    assert modes["before"] == modes["after"]


def test_a_sparse_tensor_shares_its_values() -> None:  # B19
    def build(graph: Graph, x: Node) -> Node:
        values = graph.call_function(torch.clone, (x,))
        sparse = graph.call_function(torch.sparse_coo_tensor, (graph.placeholder("indices"), values, (4, 4)))
        graph.call_method("add_", (values, 1))
        return graph.call_method("to_dense", (sparse,))

    assert orders(made(build), "add_", "to_dense")
