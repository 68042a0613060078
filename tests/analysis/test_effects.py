"""Which nodes keep their order, and which are free."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace, wrap

from partita.analysis.effects.calls import CallEffects
from partita.analysis.effects.graph import GraphEffects, effects_of_graph

A = torch.ops.aten


def effects_by_name(module: GraphModule, **options: Any) -> tuple[set[tuple[str, str]], GraphEffects]:
    calls = CallEffects(module, **options)
    effects, index = effects_of_graph(calls), calls.index
    return {(index.nodes[i].name, index.nodes[j].name) for i, j in effects.edges()}, effects


def edges_of(program: Callable[..., Any] | nn.Module, **options: Any) -> set[tuple[str, str]]:
    return effects_by_name(symbolic_trace(program), **options)[0]


def module_of(build: Callable[[Graph], Any], root: nn.Module | None = None) -> GraphModule:
    graph = Graph()
    graph.output(build(graph))
    return GraphModule(root or nn.Module(), graph)


def test_a_graph_that_only_computes_has_no_effects():
    module = symbolic_trace(lambda x, y: torch.relu(x).view(-1) + F.linear(x, y).sum())
    edges, effects = effects_by_name(module)
    assert not edges
    assert effects == GraphEffects(effects.before, effects.after)


def test_a_write_stays_between_the_reads_around_it():
    def program(x):
        early = x.sin()
        x.add_(1)
        return early, x.cos(), x.view(-1).tan()

    assert edges_of(program) == {("sin", "add_"), ("add_", "cos"), ("add_", "view"), ("add_", "tan")}


def test_data_edges_are_not_repeated():
    assert edges_of(lambda x: x.sin().add_(1).mul_(2).cos()) == set()


def test_writes_to_different_new_tensors_are_free():
    def program(x, y):
        return x.sin().add_(1), y.sin().add_(1)

    assert edges_of(program) == set()


def test_inputs_may_be_one_tensor_once_one_is_written():
    def program(x, y):
        early = y.sin()
        x.add_(1)
        return early

    assert edges_of(program) == {("sin", "add_")}


def test_numbers_among_the_inputs_alias_nothing():
    def build(graph):
        x, n = graph.placeholder("x"), graph.placeholder("n")
        n.meta["val"] = 3
        early = graph.call_function(operator.neg, (n,))
        graph.call_method("add_", (x, 1))
        return early

    assert effects_by_name(module_of(build))[0] == set()


def test_traced_storages_join_values_that_no_schema_joins():
    def build(graph):
        x = graph.placeholder("x")
        a, b = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
        shared = torch.zeros(2)
        a.meta["val"], b.meta["example_value"] = shared, shared[:1]
        graph.call_method("add_", (a, 1))
        return graph.call_function(torch.tan, (b,))

    assert ("add_", "tan") in effects_by_name(module_of(build))[0]


def _norm_between_reads(norm: nn.Module) -> GraphModule:
    def build(graph):
        x = graph.placeholder("x")
        before = graph.call_function(torch.sin, (graph.get_attr("norm.running_mean"),))
        normal = graph.call_module("norm", (x,))
        return before, normal, graph.call_function(torch.cos, (graph.get_attr("norm.running_mean"),))

    root = nn.Module()
    root.norm = norm
    return module_of(build, root)


def test_a_module_that_writes_its_buffers_is_seen_by_those_who_fetch_them():
    edges, effects = effects_by_name(_norm_between_reads(nn.BatchNorm1d(4)))
    assert edges == {("sin", "norm"), ("norm", "cos")}
    assert (len(effects.mutated_state), len(effects.mutated_inputs)) == (3, 2)
    assert effects_by_name(_norm_between_reads(nn.BatchNorm1d(4).eval()))[0] == set()


def test_a_written_parameter_is_seen_by_the_module_that_owns_it():
    def build(graph):
        x, bias = graph.placeholder("x"), graph.get_attr("linear.bias")
        early = graph.call_module("linear", (x,))
        graph.call_method("zero_", (bias,))
        return early, graph.call_module("linear", (x,))

    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    edges, effects = effects_by_name(module_of(build, root))
    assert edges == {("linear", "zero_"), ("zero_", "linear_1")}
    assert effects.mutated_inputs == (1,)


def test_buffers_that_overlap_are_one_storage():
    def build(graph):
        graph.call_method("zero_", (graph.get_attr("first"),))
        return graph.call_function(torch.sin, (graph.get_attr("second"),))

    root = nn.Module()
    root.register_buffer("first", torch.zeros(4))
    root.register_buffer("second", root.first[1:])
    assert effects_by_name(module_of(build, root))[0] == {("zero_", "sin")}


def test_draws_form_one_chain_with_explicit_generators_in_it():
    def program(x, generator):
        return F.dropout(x), torch.bernoulli(x, generator=generator), F.dropout(x, training=False), torch.rand_like(x)

    assert edges_of(program) == {("dropout", "bernoulli"), ("bernoulli", "rand_like")}


def test_asserts_keep_their_order_and_bind_nothing_else():
    def program(x):
        torch._assert(x, "one")
        a = x.sin()
        torch._assert(x, "two")
        return a, torch.rand_like(x)

    assert edges_of(program) == {("_assert", "_assert_1")}


def test_the_guards_of_an_exported_program_are_no_barrier():
    module = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)).module()
    edges, effects = effects_by_name(module)
    assert (edges, effects.barriers, effects.mutated_inputs) == (set(), (), ())


@wrap
def mystery(x):
    return x


def test_an_unknown_function_is_a_barrier_to_what_it_could_touch_and_nothing_else():
    def program(x, y):
        before, fresh = x.sin(), y.exp()
        mystery(before)
        return before.cos(), fresh.tan(), torch.rand_like(fresh)

    module = symbolic_trace(program)
    edges, effects = effects_by_name(module)
    assert edges == {("mystery", "cos"), ("mystery", "rand_like")}
    assert len(effects.barriers) == 1
    assert effects_by_name(module, pure=frozenset({mystery}))[1].barriers == ()


def test_a_barrier_orders_the_readers_of_state_and_not_its_fetching():
    def build(graph):
        x = graph.placeholder("x")
        graph.call_function(mystery, (x,))
        return graph.call_function(torch.sin, (graph.get_attr("weight"),))

    root = nn.Module()
    root.weight = nn.Parameter(torch.zeros(2))
    edges = effects_by_name(module_of(build, root))[0]
    assert ("mystery", "sin") in edges
    assert ("mystery", "weight") not in edges


def test_mode_toggles_have_no_edges():
    graph = Graph()
    x = graph.placeholder("x")
    for target, args in (
        (torch._C._set_grad_enabled, (False,)),
        (A.add_.Tensor, (x, 1)),
        (torch._C._functorch._vmap_increment_nesting, (1, "error")),
        (torch._C._set_grad_enabled, (True,)),
        (mystery, (x,)),
    ):
        graph.call_function(target, args)
    graph.output(x)
    edges, effects = effects_by_name(GraphModule(nn.Module(), graph))
    assert not any("grad" in name for edge in edges for name in edge)
    assert len(effects.effectful) == 3


def test_every_call_stays_on_its_side_of_a_transform():
    def build(graph):
        x = graph.placeholder("x")
        a = graph.call_function(torch.sin, (x,))
        graph.call_function(torch._C._functorch._vmap_increment_nesting, (1, "error"))
        b = graph.call_function(torch.cos, (x,))
        graph.call_function(torch._C._functorch._vmap_decrement_nesting, ())
        return a, b, graph.call_function(torch.tan, (x,))

    enter, leave = "_vmap_increment_nesting", "_vmap_decrement_nesting"
    assert effects_by_name(module_of(build))[0] == {("sin", enter), (enter, "cos"), ("cos", leave), (leave, "tan")}


def test_nothing_is_read_before_its_collective_is_waited_for_nor_written_while_it_runs():
    functional = torch.ops._c10d_functional

    def build(graph):
        x, y = graph.placeholder("x"), graph.placeholder("y")
        a = graph.call_function(torch.sin, (x,))
        first = graph.call_function(functional.all_reduce.default, (a, "sum", "0"), name="first")
        second = graph.call_function(functional.all_reduce.default, (y, "sum", "0"), name="second")
        graph.call_function(functional.wait_tensor.default, (first,), name="wait")
        graph.call_method("add_", (a, 1))
        graph.call_function(torch.cos, (y,))
        return graph.call_function(torch.tan, (first,)), second

    edges = effects_by_name(module_of(build))[0]
    assert edges == {("first", "second"), ("first", "add_"), ("wait", "add_"), ("wait", "tan")}


def test_a_body_that_draws_joins_the_chain_and_one_that_computes_does_not():
    def build(graph):
        x = graph.placeholder("x")
        hop = torch.ops.higher_order.wrap_with_set_grad_enabled
        calls = [graph.call_function(hop, (False, graph.get_attr(name), x), name=f"call_{name}") for name in "ab"]
        return calls, graph.call_function(torch.rand_like, (x,))

    root = nn.Module()
    root.a = symbolic_trace(lambda x: (F.dropout(x),))
    root.b = symbolic_trace(lambda x: (x.sin(),))
    assert effects_by_name(module_of(build, root))[0] == {("call_a", "rand_like")}


def test_a_body_that_writes_its_own_buffer_is_reported():
    def build(graph):
        hop = torch.ops.higher_order.wrap_with_set_grad_enabled
        early = graph.call_function(torch.sin, (graph.get_attr("body.buffer"),))
        return early, graph.call_function(hop, (False, graph.get_attr("body")), name="call")

    root = nn.Module()
    owner = nn.Module()
    owner.register_buffer("buffer", torch.zeros(2))
    root.body = module_of(lambda graph: (graph.call_method("zero_", (graph.get_attr("buffer"),)),), owner)
    module = module_of(build, root)
    edges, effects = effects_by_name(module)
    assert edges == {("sin", "call")}
    assert [tensor is owner.buffer for tensor in effects.mutated_state] == [True]


def test_functions_registered_with_torch_as_effectful_are_chained():
    operation = torch.ops.aten.sin.default
    module = module_of(lambda graph: [graph.call_function(operation, (graph.placeholder(n),)) for n in "xy"])
    assert effects_by_name(module)[0] == set()
    torch.fx.node._side_effectful_functions.add(operation)
    try:
        assert effects_by_name(module)[0] == {("sin_default", "sin_default_1")}
    finally:
        torch.fx.node._side_effectful_functions.discard(operation)


def test_edges_are_linear_in_the_number_of_readers():
    def program(x):
        for _ in range(20):
            for _ in range(20):
                x.sin()
            x.add_(1)
        return x

    assert len(edges_of(program)) < 2 * 20 * 21
