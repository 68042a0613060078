"""Borders: only tensors and symbolic numbers cross, with every symbol that they mention and nothing that is unused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from tests.helpers.core import cut, listing, program_of, text
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from partita import Program, fingerprint, inline, verify
from partita.testing import captured_case


def chunked(*, traced: bool) -> Program:
    """x.chunk(2), its first item, and the whole of it concatenated."""
    graph = Graph()
    x = graph.placeholder("x")
    pieces = graph.call_method("chunk", (x, 2))
    first = graph.call_function(operator.getitem, (pieces, 0))
    sine = graph.call_function(torch.sin, (first,))
    joined = graph.call_function(torch.cat, (pieces,))
    graph.output((sine, joined))
    if traced:
        pieces.meta["val"] = torch.ones(4, 2).chunk(2)
        first.meta["val"] = torch.ones(2, 2)
    return program_of(graph)


def test_an_item_is_taken_out_where_the_container_is_made() -> None:
    after = cut(chunked(traced=False), {"chunk": "make", "getitem": "use", "sin": "use"}).module()
    assert listing(after.make) == text("""
        x: input
        chunk = .chunk(x, 2)
        getitem = getitem(chunk, 0)
        return (getitem, chunk)
    """)
    assert listing(after.use) == text("""
        getitem: input
        sin = sin(getitem)
        return (sin,)
    """)


def test_an_item_of_a_container_outside_is_taken_out_outside() -> None:
    after = cut(chunked(traced=False), {"getitem": "use", "sin": "use"}).module()
    assert [node.name for node in after.graph.nodes][:4] == ["x", "chunk", "getitem", "use"]
    assert listing(after.use).startswith("getitem: input\nsin")


def test_a_whole_container_crosses_item_by_item() -> None:
    program = chunked(traced=True)
    after = cut(program, {"chunk": "make", "cat": "join"})
    assert listing(after.module().join) == text("""
        chunk_item_0: input
        chunk_item_1: input
        cat = cat((chunk_item_0, chunk_item_1))
        return (cat,)
    """)
    assert listing(after) == text("""
        x: input
        make = self.make(x)
        getitem = getitem(make, 0)
        chunk_item_0 = getitem(make, 1)
        chunk_item_1 = getitem(make, 2)
        sin = sin(getitem)
        join = self.join(chunk_item_0, chunk_item_1)
        cat = getitem(join, 0)
        return (sin, cat)
    """)
    verify(program, after, (torch.randn(4, 2),))


def test_a_list_stays_a_list() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    pieces = graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    graph.output((graph.call_function(torch.cat, (pieces,)), pieces))
    pieces.meta["val"] = list(torch.ones(4).split(2))
    program = program_of(graph)
    after = cut(program, {"split": "make", "cat": "join"})
    joined = next(node for node in after.module().join.graph.nodes if node.name == "cat")
    assert isinstance(joined.args[0], list)
    assert isinstance(after.module()(torch.ones(4))[1], list)
    verify(program, after, (torch.ones(4),))


def test_every_item_has_the_value_that_was_traced_for_it() -> None:
    after = cut(chunked(traced=True), {"chunk": "make", "cat": "join"}).module()
    for graph in (after.graph, after.join.graph, after.make.graph):
        values = {node.name: node.meta["val"].shape for node in graph.nodes if "_item_" in node.name}
        assert values == {"chunk_item_0": (2, 2), "chunk_item_1": (2, 2)}


def sized(tracing: str) -> tuple[Program, tuple[Tensor, ...]]:
    """A program that reads a size, computes with it and expands to it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0]
        return y.new_ones(rows * 2, 3).sin() + x.repeat(2, 1)

    args = torch.ones(4, 3), torch.ones(7)
    return Program.of(make_fx(function, tracing_mode=tracing)(*args)), args


def symbolic_inputs(body: GraphModule) -> list[str]:
    values = [node.meta.get("val", node.meta.get("example_value")) for node in body.graph.find_nodes(op="placeholder")]
    return [str(value) for value in values if isinstance(value, torch.SymInt)]


def shape_symbols(body: GraphModule) -> set[str]:
    values = [node.meta.get("val", node.meta.get("example_value")) for node in body.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    return {str(s) for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def test_a_region_gets_the_symbols_that_its_inputs_mention() -> None:
    program, args = sized("symbolic")
    names = [node.name for node in program.operators()]
    after = cut(program, {name: "one" if place < len(names) - 2 else "two" for place, name in enumerate(names)})
    for body in (after.module().one, after.module().two):
        assert shape_symbols(body) <= set(symbolic_inputs(body))
    verify(program, after, args)


@pytest.mark.parametrize("route", ["export_dynamic", "make_fx_symbolic", "dynamo"])
@pytest.mark.parametrize("parts", [2, 5])
def test_captured_programs_pass_their_symbols(route: str, parts: int) -> None:
    case = captured_case("Attention", route)
    program = Program.of(case.graph_module)
    names = [node.name for node in program.operators()]
    size = -(-len(names) // parts)
    after = cut(program, {name: f"part{place // size}" for place, name in enumerate(names)})
    for name, body in after.module().named_children():
        if isinstance(body, GraphModule) and name.startswith("part"):
            assert shape_symbols(body) <= set(symbolic_inputs(body)), name
    verify(program, after, case.args)


def test_a_number_that_a_region_computes_is_given_to_those_whose_shapes_mention_it() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            count = x.sum().int().item()
            torch._check(count >= 0)
            return torch.ones(count) * 2

    exported = torch.export.export(Filled(), (torch.tensor([1.0, 2.0]),)).module()
    program = Program.of(exported)
    product = next(node for node in program.operators() if node.name.startswith("mul"))
    after = cut(program, {node.name: "use" if node is product else "make" for node in program.operators()}).module()
    assert symbolic_inputs(after.make) == []
    assert symbolic_inputs(after.use) == ["u0"]
    assert after(torch.tensor([1.0, 2.0])).tolist() == [2.0] * 3


def test_a_size_that_only_the_data_tells_goes_along() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.nonzero().float().sin() + 1

    exported = torch.export.export(Chosen(), (torch.tensor([1.0, 0.0, 2.0]),)).module()
    program = Program.of(exported)
    names = [node.name for node in program.operators()]
    after = cut(program, {name: "then" if name in names[-2:] else "first" for name in names}).module()
    assert [name for name in symbolic_inputs(after.then) if name.startswith("u")] == ["u0"]
    verify(program, Program.of(after), (torch.tensor([1.0, 0.0, 2.0]),))
    assert after(torch.tensor([1.0, 1.0, 5.0])).shape == (3, 1)


def size_program(key: str) -> Program:
    """x.size() made in one place and viewed to in another."""
    traced = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.ones(4, 3))
    value = next(iter(traced.graph.nodes)).meta["val"]
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    size = graph.call_method("size", (x,))
    graph.output(graph.call_method("view", (y, size)))
    x.meta[key], size.meta[key] = value, torch.Size([value.shape[0], value.shape[1]])
    return program_of(graph)


@pytest.mark.parametrize("key", ["val", "example_value"])
def test_a_size_of_symbols_crosses_symbol_by_symbol(key: str) -> None:
    program = size_program(key)
    after = cut(program, {"size": "make", "view": "use"})
    lines = listing(after.module().use).splitlines()
    assert "\n".join(line for line in lines if not line.startswith("x_size")) == text("""
        y: input
        size_item_0: input
        size_item_1: input
        size = Size((size_item_0, size_item_1))
        view = .view(y, size)
        return (view,)
    """)
    kinds = {type(node.meta[key]) for node in after.module().use.graph.nodes if "item" in node.name}
    assert kinds == {torch.SymInt}
    assert after.module()(torch.ones(4, 3), torch.ones(12)).shape == (4, 3)
    assert after.module()(torch.ones(2, 3), torch.ones(6)).shape == (2, 3)


def test_the_constants_of_a_symbolic_size_do_not_cross() -> None:
    program = size_program("val")
    size = program.node("size")
    size.meta["val"] = torch.Size([size.meta["val"][0], 3])
    after = cut(program, {"size": "make", "view": "use"})
    assert "Size((size_item_0, 3))" in listing(after.module().use)
    assert "size_item_1" not in listing(after.module().use)


@pytest.mark.parametrize("labels", [{"size": "make", "zeros": "use"}, {"zeros": "use"}, {"size": "make"}])
def test_the_size_of_a_scalar_is_made_where_it_is_read(labels: dict[str, str]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    size = graph.call_method("size", (x,))
    graph.output(graph.call_function(torch.zeros, (size,)))
    x.meta["val"], size.meta["val"] = torch.ones(()), torch.Size([])
    program = program_of(graph)
    after = cut(program, labels)
    assert after.module()(torch.ones(())).shape == ()
    made = [node.name for node in after.index.nodes if node.op == "call_module"]
    assert fingerprint(inline(after, made)) == fingerprint(program)


def conditional() -> Program:
    """A higher-order operator with two bodies that are read as attributes."""
    root = nn.Module()
    for name, target in (("then", torch.sin), ("other", torch.cos)):
        body = Graph()
        body.output((body.call_function(target, (body.placeholder("x"),)),))
        root.add_module(name, GraphModule(nn.Module(), body))
    graph = Graph()
    x = graph.placeholder("x")
    positive = graph.call_function(torch.is_nonzero, (x,))
    then, other = graph.get_attr("then"), graph.get_attr("other")
    chosen = graph.call_function(torch.ops.higher_order.cond, (positive, then, other, (x,)))
    graph.output(graph.call_function(operator.getitem, (chosen, 0)))
    return program_of(graph, root)


def test_bodies_of_operators_move_inside() -> None:
    program = conditional()
    after = cut(program, {"cond": "part", "getitem": "part"})
    module: Any = after.module()
    assert not module.graph.find_nodes(op="get_attr")
    assert len(module.part.graph.find_nodes(op="placeholder")) == 2
    assert module.part.then is program.graph_module.then
    assert not hasattr(module, "then")


def test_inputs_come_in_order_of_first_use_and_none_is_unused() -> None:
    graph = Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    late = graph.call_function(torch.add, (c, a))
    graph.output((graph.call_function(torch.mul, (late, c)), b))
    body = cut(program_of(graph), {"add": "part", "mul": "part"}).module().part
    assert [node.name for node in body.graph.find_nodes(op="placeholder")] == ["c", "a"]
    assert listing(body).endswith("return (mul,)")
