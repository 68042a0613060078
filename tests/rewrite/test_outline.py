"""Outlining: each region is one call in a new program that shares the state of the old one and keeps its manners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.core import cut, listing, program_of, text
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita import Partition, Program, Region, outline, verify
from partita._torch.toggles import SET_GRAD
from partita.analysis.tolerance import EXACT
from partita.errors import CycleError, MissingTargetError, RegionError
from partita.testing.generator.build import dump


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, x: Tensor, *, flip: bool = False) -> Tensor:
        hidden = self.linear(x) * self.scale
        return torch.relu(hidden + self.shift) - x


def test_a_region_becomes_a_call_and_a_body() -> None:
    program = program_of(Small())
    after = cut(program, {"linear": "first", "mul": "first", "add": "second"})
    assert listing(after) == text("""
        x: input
        flip: input = False
        scale = self.scale
        first = self.first(x, scale)
        mul = getitem(first, 0)
        shift = self.shift
        second = self.second(mul, shift)
        add = getitem(second, 0)
        relu = relu(add)
        sub = sub(relu, x)
        return sub
    """)
    assert listing(after.module().first) == text("""
        x: input
        scale: input
        linear = self.linear(x)
        mul = mul(linear, scale)
        return (mul,)
    """)
    verify(program, after, (torch.randn(3, 2),))


def test_state_is_shared_and_nothing_else_changes() -> None:
    program = program_of(Small())
    before = dump(program.graph_module)
    module: Any = cut(program, {"linear": "first", "mul": "first"}).module()
    assert module.first.linear is program.graph_module.linear
    assert module.scale is program.graph_module.scale
    assert "shift" in dict(module.named_buffers())
    assert "shift" not in module.state_dict()
    assert dump(program.graph_module) == before


def test_order_changes_only_where_it_must() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    names = ["sin", "cos", "tan", "exp"]
    values = [graph.call_function(getattr(torch, name), (x,)) for name in names]
    graph.output(tuple(values))
    program = program_of(graph)
    after = cut(program, {"sin": "pair", "exp": "pair"})
    assert [node.name for node in after.graph.nodes] == ["x", "pair", "sin", "exp", "cos", "tan", "output"]
    assert after.tolerance.rounding > 0
    assert cut(program, {"sin": "pair", "cos": "pair"}).tolerance == EXACT


def test_metadata_is_copied_so_that_edits_stay_apart() -> None:
    program = program_of(Small())
    node = program.node("mul")
    node.meta["stack"] = {"inner": ["a"]}
    module: Any = cut(program, {"mul": "part", "add": "part"}).module()
    copied = next(other for other in module.part.graph.nodes if other.name == "mul")
    copied.meta["stack"]["inner"].append("b")
    assert node.meta["stack"] == {"inner": ["a"]}


def test_the_value_of_a_call_is_the_tuple_of_what_it_gives() -> None:
    program = program_of(Small())
    for node in program.index.nodes:
        node.meta["val"] = node.name
    outer = cut(program, {"mul": "part", "linear": "part"}).module().graph
    call = next(node for node in outer.nodes if node.name == "part")
    assert call.meta["val"] == ("mul",)
    assert next(node for node in outer.nodes if node.name == "mul").meta["val"] == "mul"


def test_a_module_called_in_two_regions_stays_one_module() -> None:
    class Twice(Small):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu(self.linear(x)))

    program = program_of(Twice())
    after = cut(program, {"linear": "one", "linear_1": "two"})
    module: Any = after.module()
    assert module.one.linear is module.two.linear
    assert len(list(module.parameters())) == 2
    verify(program, after, (torch.randn(3, 2),))


def test_paths_that_join_to_the_same_name_stay_apart() -> None:
    root = nn.Module()
    root.a = nn.Module()
    root.a.b, root.a_b = nn.Linear(2, 2), nn.Linear(2, 2)
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("a_b", (graph.call_module("a.b", (x,)),)))
    program = program_of(graph, root)
    after = cut(program, {node.name: "part" for node in program.operators()})
    assert sorted(after.module().part._modules) == ["a_b", "a_b_1"]
    verify(program, after, (torch.randn(2, 2),))


def test_a_region_named_like_a_module_hides_nothing() -> None:
    program = program_of(Small())
    region = Region("linear", (program.node("relu"),))
    module = outline(Partition(program, [region])).graph_module
    x = torch.randn(3, 2)
    assert torch.equal(module(x), program.module()(x))


@pytest.mark.parametrize("name", ["linear", "scale", "forward", "graph", "training", "class", "0", "a b", ""])
def test_a_plan_takes_any_region_name(name: str) -> None:
    program = program_of(Small())
    after = cut(program, {"relu": name, "linear": "other"})
    verify(program, after, (torch.randn(3, 2),))


def test_a_body_switches_to_its_modes_and_back() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,))
    sine = graph.call_function(torch.sin, (x,))
    graph.call_function(SET_GRAD, (True,))
    graph.output(graph.call_function(torch.cos, (sine,)))
    after = cut(program_of(graph), {"sin": "part", "cos": "part"})
    assert listing(after.module().part) == text("""
        x: input
        is_grad_enabled = is_grad_enabled()
        _set_grad_enabled = _set_grad_enabled(False)
        sin = sin(x)
        _set_grad_enabled_1 = _set_grad_enabled(True)
        cos = cos(sin)
        _set_grad_enabled_2 = _set_grad_enabled(is_grad_enabled)
        return (cos,)
    """)
    assert listing(after) == text("""
        x: input
        part = self.part(x)
        cos = getitem(part, 0)
        _set_grad_enabled_2 = _set_grad_enabled(True)
        return cos
    """)


def test_regions_of_toggles_or_attributes_alone_are_called_with_nothing() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,))
    weight = graph.create_node("get_attr", "weight")
    graph.output(graph.call_function(torch.mul, (x, weight)))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(2))
    program = program_of(graph, root)
    regions = [Region("switch", (program.node("_set_grad_enabled"),)), Region("read", (program.node("weight"),))]
    module = outline(Partition(program, regions)).graph_module
    assert not module(torch.ones(2)).requires_grad
    torch.set_grad_enabled(True)


def test_an_error_leaves_the_input_as_it_was() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    missing = graph.create_node("get_attr", "nowhere")
    graph.output(graph.call_function(torch.mul, (x, missing)))
    root = nn.Module()
    root.nowhere = torch.ones(1)
    module = GraphModule(root, graph)
    del module.nowhere
    before = dump(module)
    with pytest.raises(MissingTargetError, match="nowhere"):
        cut(Program.of(module), {"mul": "part"})
    assert dump(module) == before


def test_bad_regions_are_refused_and_named() -> None:
    program, other = program_of(Small()), program_of(Small())
    node = program.node
    with pytest.raises(RegionError, match="'r' is empty"):
        Region("r", ())
    with pytest.raises(RegionError, match="'r' holds 'x', 'output'"):
        Region("r", (node("x"), node("output")))
    with pytest.raises(RegionError, match="'a' and 'b' overlap: both hold 'mul'"):
        Partition(program, [Region("a", (node("mul"),)), Region("b", (node("add"), node("mul")))])
    with pytest.raises(RegionError, match="'r' holds 'mul', which is not a node of this program"):
        Partition(program, [Region("r", (other.node("mul"),))])
    with pytest.raises(RegionError, match="two regions are called 'r'"):
        Partition(program, [Region("r", (node("mul"),)), Region("r", (node("add"),))])


def test_a_cycle_names_its_nodes_and_a_repair() -> None:
    program = program_of(Small())
    with pytest.raises(CycleError) as caught:
        Partition(program, [Region("r", (program.node("linear"), program.node("relu")))])
    told = str(caught.value)
    assert "node 'mul' before node 'add' (mul -> add)" in told
    assert "region 'r' before node 'mul' (linear -> mul)" in told
    assert "To repair it, add 'mul', 'add' to 'r', or put 'linear' and 'relu' of 'r' into different regions" in told
