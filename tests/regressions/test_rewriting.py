"""Bugs that once gave results that did not run, ran the wrong thing, reported wrong facts, or took far too long."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers.core import cut
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from partita import Partition, Plan, Program, Region, compare, inline, plan
from partita._torch.toggles import SET_GRAD
from partita.errors import RegionError
from partita.policies import ByLabel, BySize
from partita.testing.laws.core import _is_symbolic
from partita.treatments import Call


def layers() -> GraphModule:
    return symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def halves(module: GraphModule) -> Program:
    return plan(Program.of(module), BySize(parts=2), Call()).apply()


def graph_module(build: Callable[[Graph, Node], Any], root: nn.Module | None = None) -> GraphModule:
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return GraphModule(root or nn.Module(), graph)


def with_own_forward(module: GraphModule) -> None:
    module.forward = module.forward


def compiled(module: GraphModule) -> None:
    module.compile(backend="eager")


@pytest.mark.parametrize("change", [with_own_forward, compiled])  # B8
def test_a_cut_module_runs_its_parts(change: Callable[[GraphModule], None]) -> None:
    module = layers()
    change(module)
    after = halves(module).module()
    called: list[int] = []
    for part in after.children():
        part.register_forward_hook(lambda *told: called.append(1))
    after(torch.ones(2))
    assert called == [1, 1]


def test_inlining_keeps_what_is_named_below_a_body() -> None:  # B9
    root = nn.Module()
    root.body = graph_module(lambda graph, x: graph.call_function(torch.neg, (x,)))
    module = graph_module(
        lambda graph, x: graph.call_module("body.other", (graph.call_module("body", (x,)),)),
        _with_other(root),
    )
    assert torch.equal(inline(Program.of(module)).module()(torch.ones(2)), module(torch.ones(2)))


def _with_other(root: nn.Module) -> nn.Module:
    root.get_submodule("body").other = nn.Linear(2, 2)
    return root


def test_paths_that_look_alike_stay_apart_in_a_body() -> None:  # B10
    root = nn.Module()
    root.a, root.a_b = nn.Module(), nn.Module()
    root.a.b = nn.Linear(2, 2)
    root.a_b.body = graph_module(lambda graph, x: (graph.call_function(torch.neg, (x,)),))

    def build(graph: Graph, x: Node) -> Node:
        wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
        results = graph.call_function(wrap, (True, graph.get_attr("a_b.body"), x))
        return graph.call_module("a.b", (graph.call_function(operator.getitem, (results, 0)),))

    module = graph_module(build, root)
    after = plan(Program.of(module), ByLabel(lambda node: 0), Call()).apply().module()
    assert torch.equal(after(torch.ones(2)), module(torch.ones(2)))
    assert list(dict(module.get_submodule("a.b").named_modules())) == [""]


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


@dataclass(frozen=True)
class Wrap:
    def treat(self, body: GraphModule) -> nn.Module:
        return Wrapper(body)


def test_state_keeps_its_names_through_a_treatment_that_wraps() -> None:  # B11
    module = layers()
    after = plan(Program.of(module), BySize(parts=2), Wrap()).apply()
    assert set(after.original_state()) == set(module.state_dict())
    after.load_original_state(module.state_dict())


def test_metadata_that_cannot_be_copied_does_not_stop_a_copy() -> None:  # B12
    module = layers()
    module.meta["lock"] = threading.Lock()
    after = halves(module).module()
    assert copy.deepcopy(after).meta["lock"] is module.meta["lock"]


def test_leaves_of_one_shape_outside_the_state_are_distinguished() -> None:  # B15
    first, second = (torch.randn(2, requires_grad=True) for _ in range(2))

    def call(x: Tensor) -> Tensor:
        return (x * first * 3 + second).sum()

    assert compare(call, call, (torch.randn(2),)).equal


def test_a_leaf_that_only_the_second_reaches_is_reported() -> None:  # B15
    weight = torch.randn(2, requires_grad=True)

    def reaching(x: Tensor) -> Tensor:
        return x * weight

    def stopping(x: Tensor) -> Tensor:
        return x * weight.detach() + (x * 0).requires_grad_(x.requires_grad)

    x = torch.randn(2, requires_grad=True)
    assert not compare(stopping, reaching, (x,)).equal
    assert not compare(reaching, stopping, (x,)).equal


def test_comparing_puts_back_a_weight_that_an_embedding_scales() -> None:  # B16
    module = symbolic_trace(nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 2)))
    weight = module.get_parameter("0.weight")
    before = weight.detach().clone()
    assert compare(module, module, (torch.tensor([0, 1, 2]),)).equal
    assert torch.equal(weight, before)


def test_regions_may_not_share_an_attribute() -> None:  # B18
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2))

    def build(graph: Graph, x: Node) -> Node:
        weight = graph.get_attr("weight")
        return graph.call_function(torch.mul, (graph.call_function(torch.add, (x, weight)), weight))

    program = Program.of(graph_module(build, root))
    _, weight, add, mul, _ = program.index.nodes
    with pytest.raises(RegionError, match="overlap"):
        Partition(program, [Region("one", (weight, add)), Region("two", (weight, mul))])


def test_a_region_is_checked_when_it_is_made() -> None:  # B18
    first, *_ = Program.of(layers()).operators()
    assert Region("a", [first]).nodes == (first,)  # type: ignore[arg-type]
    with pytest.raises(RegionError):
        Region("a", (first, first))
    with pytest.raises(RegionError):
        Region("a", first)  # type: ignore[arg-type]


def test_a_failing_call_outside_all_regions_puts_modes_back() -> None:  # D10
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no")

    def build(graph: Graph, x: Node) -> Node:
        graph.call_function(SET_GRAD, (False,))
        result = graph.call_function(fail, (graph.call_function(torch.mul, (x, 2), name="inside"),))
        graph.call_function(SET_GRAD, (True,))
        return result

    after = cut(Program.of(graph_module(build)), {"inside": 0}).module()
    with torch.enable_grad():
        with pytest.raises(ValueError, match="no"):
            after(torch.ones(1))
        assert torch.is_grad_enabled()


def test_a_node_without_metadata_is_not_taken_for_a_symbol() -> None:  # T1
    graph = Graph()
    assert not _is_symbolic(graph.placeholder("x"))


def flat(size: int) -> Plan:
    root, names = nn.Module(), [f"m{number}" for number in range(size)]
    for name in names:
        setattr(root, name, nn.ReLU())
    return in_two(root, names)


def nested(size: int) -> Plan:
    root = nn.Module()
    root.blocks = nn.ModuleList(nn.ModuleList([nn.ReLU() for _ in range(4)]) for _ in range(size // 4))
    return in_two(root, [f"blocks.{number // 4}.{number % 4}" for number in range(size)])


def in_two(root: nn.Module, names: list[str]) -> Plan:
    graph = Graph()
    x = graph.placeholder("x")
    for name in names:
        x = graph.call_module(name, (x,))
    graph.output(x)
    return plan(Program.of(GraphModule(root, graph)), BySize(parts=2), Call())


def containers(size: int) -> Plan:
    graph, whole = Graph(), torch.zeros(4)
    x = graph.placeholder("x")
    joined = []
    for _ in range(size):
        pieces = graph.call_function(torch.split, (x, 2))
        joined.append(graph.call_function(torch.cat, (pieces,)))
        x.meta["val"] = joined[-1].meta["val"] = whole
        pieces.meta["val"] = (whole[:2], whole[2:])
    graph.output(tuple(joined))
    policy = ByLabel(lambda node: 0 if node.target is torch.split else None)
    return plan(Program.of(GraphModule(nn.Module(), graph)), policy, Call())


@pytest.mark.parametrize("shape", [flat, nested, containers])  # P1, P2, P3
def test_cutting_grows_with_the_size_of_the_program(shape: Callable[[int], Plan]) -> None:
    small, large = shape(500), shape(2000)
    assert calls_during(large.apply) < 5 * calls_during(small.apply)
