"""AroundOperators: who is chosen, and where views, sizes and small runs go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.policies.helpers import parts, program_of
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

import partita
from partita import Program
from partita.policies import AroundOperators
from partita.treatments import Call


def by_steps(*steps: str) -> Program:
    """A chain of functions of torch, or of methods where the step begins with a dot."""

    def write(graph: Graph) -> Node:
        value = graph.placeholder("x")
        for step in steps:
            if step.startswith("."):
                value = graph.call_method(step[1:], (value, 0))
            else:
                value = graph.call_function(getattr(torch, step), (value,))
        return value

    return program_of(write)


def test_chosen_operators_stand_alone() -> None:
    partition = AroundOperators(torch.cos)(by_steps("sin", "cos", "exp", "cos", "tan"))
    assert parts(partition) == [["sin"], ["cos"], ["exp"], ["cos_1"], ["tan"]]
    assert [region.name for region in partition] == ["part_0", "cos", "part_1", "cos_1", "part_2"]
    assert [region.label for region in partition] == ["between", "chosen", "between", "chosen", "between"]


def test_chosen_operators_lead_a_part() -> None:
    partition = AroundOperators(torch.cos, alone=False)(by_steps("sin", "cos", "exp", "cos", "tan"))
    assert parts(partition) == [["sin"], ["cos", "exp"], ["cos_1", "tan"]]


@pytest.mark.parametrize(("together", "expected"), [(False, [["cos"], ["tan"]]), (True, [["cos", "tan"]])])
def test_neighbours_share_a_region_if_asked(together: bool, expected: list[list[str]]) -> None:
    policy = AroundOperators((torch.cos, torch.tan), together=together)
    assert parts(policy(by_steps("sin", "cos", "tan", "exp"))) == [["sin"], *expected, ["exp"]]


def test_without_a_chosen_operator_all_is_one_region() -> None:
    assert parts(AroundOperators(torch.mm, allow_empty=True)(by_steps("sin", "cos"))) == [["sin", "cos"]]


def test_small_runs_join_the_chosen_operator_whose_result_they_read() -> None:
    steps = ("sin", "exp", "cos", "tan", "cos", "exp", "sin")
    assert parts(AroundOperators(torch.cos, min_size=2)(by_steps(*steps))) == [
        ["sin", "exp"],
        ["cos", "tan"],
        ["cos_1"],
        ["exp_1", "sin_1"],
    ]


def test_a_view_between_chosen_operators_makes_no_region() -> None:
    partition = AroundOperators(torch.cos)(by_steps(".unsqueeze", "cos", ".unsqueeze", "cos", ".squeeze"))
    assert parts(partition) == [["unsqueeze", "cos", "unsqueeze_1"], ["cos_1", "squeeze"]]


def test_a_view_goes_back_to_the_producer_past_a_chosen_operator() -> None:
    def write(graph: Graph) -> Node:
        key = graph.call_function(torch.sin, (graph.placeholder("x"),))
        first = graph.call_function(torch.cos, (key,))
        second = graph.call_function(torch.cos, (graph.call_method("view", (key, 1, -1)),))
        return graph.call_function(torch.add, (first, second))

    assert parts(AroundOperators(torch.cos)(program_of(write))) == [["sin", "view"], ["cos"], ["cos_1"], ["add"]]


def test_a_view_goes_on_to_the_consumer_past_a_chosen_operator() -> None:
    def write(graph: Graph) -> Node:
        x = graph.placeholder("x")
        first = graph.call_function(torch.cos, (x,))
        view = graph.call_method("view", (first, 1, -1))
        second = graph.call_function(torch.cos, (x,))
        return graph.call_function(torch.add, (view, second))

    assert parts(AroundOperators(torch.cos)(program_of(write))) == [["cos"], ["cos_1"], ["view", "add"]]


def test_sizes_and_views_of_what_crosses_go_to_their_consumer() -> None:
    def write(graph: Graph) -> Node:
        x = graph.placeholder("x")
        rows = graph.call_method("size", (x, 0))
        hidden = graph.call_function(torch.sin, (x,))
        view = graph.call_method("view", (hidden, -1))
        mixed = graph.call_function(torch.cos, (hidden,))
        mixed = graph.call_method("reshape", (mixed, rows, -1))
        mixed = graph.call_function(torch.add, (mixed, hidden))
        return graph.call_function(torch.add, (graph.call_function(torch.exp, (view,)), mixed))

    partition = AroundOperators(torch.cos)(program_of(write))
    assert parts(partition) == [["sin"], ["cos"], ["size", "view", "reshape", "add", "exp", "add_1"]]


def test_a_view_does_not_move_past_a_write_that_it_must_follow() -> None:
    def write(graph: Graph) -> Node:
        key = graph.call_function(torch.sin, (graph.placeholder("x"),))
        graph.call_method("unsqueeze_", (key, 0))
        view = graph.call_method("view", (key, 1, -1))
        return graph.call_function(torch.cos, (view,))

    partition = AroundOperators(("unsqueeze_", torch.cos))(program_of(write))
    assert parts(partition) == [["sin"], ["unsqueeze_"], ["view", "cos"]]


def test_nothing_moves_into_a_region_of_another_mode() -> None:
    def write(graph: Graph) -> Node:
        x = graph.placeholder("x")
        hidden = graph.call_function(torch.sin, (x,))
        graph.call_function(torch._C._set_grad_enabled, (False,))
        view = graph.call_method("view", (x, -1))
        graph.call_function(torch._C._set_grad_enabled, (True,))
        mixed = graph.call_function(torch.cos, (hidden,))
        return graph.call_function(torch.add, (view, mixed))

    assert parts(AroundOperators(torch.cos)(program_of(write)))[0] == ["sin", "view"]


def test_an_allocation_between_chosen_operators_joins_the_work_before() -> None:
    def write(graph: Graph) -> Node:
        first = graph.call_function(torch.cos, (graph.call_function(torch.sin, (graph.placeholder("x"),)),))
        out = graph.call_function(torch.empty, (2,))
        return graph.call_function(torch.cos, (first,), {"out": out})

    assert parts(AroundOperators(torch.cos)(program_of(write))) == [["sin", "empty"], ["cos"], ["cos_1"]]


@torch.library.custom_op("partita_policies::attend", mutates_args=())
def attend(query: torch.Tensor) -> torch.Tensor:
    return query.clone()


@pytest.mark.parametrize(
    ("target", "chosen"),
    [
        (functional.scaled_dot_product_attention, "aten.scaled_dot_product_attention"),
        (functional.scaled_dot_product_attention, "torch.nn.functional.scaled_dot_product_attention"),
        (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention),
        (torch.ops.aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention),
        (torch.ops.aten.scaled_dot_product_attention.default, "aten::scaled_dot_product_attention"),
        (torch.ops.aten.add.Tensor, torch.ops.aten.add),
        (torch.ops.aten.add.Tensor, torch.ops.aten.add.Tensor),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        (functional.softmax, "torch.nn.functional.softmax"),
        ("softmax", "softmax"),
        ("softmax", torch.softmax),
        (torch.ops.partita_policies.attend, "partita_policies.attend"),
        (torch.ops.partita_policies.attend, torch.ops.partita_policies.attend.default),
        (torch.ops.partita_policies.attend.default, attend),
        (torch.ops.partita_policies.attend.default, "partita_policies::attend"),
        (torch.ops.higher_order.flex_attention, "flex_attention"),
        (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention),
    ],
)
def test_an_operator_is_chosen_under_each_of_its_names(target: Any, chosen: Any) -> None:
    assert len(AroundOperators(chosen)(_around(target))) == 3


@pytest.mark.parametrize(
    ("target", "other"),
    [
        (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar),
        (torch.ops.aten.add.Tensor, "aten.add.Scalar"),
        (functional.softmax, "softmax.int"),
        ("softmax", functional.softmax),
        (torch.add, "add"),
    ],
)
def test_another_operator_is_not_chosen(target: Any, other: Any) -> None:
    assert len(AroundOperators(other, allow_empty=True)(_around(target))) == 1


def _around(target: Any) -> Program:
    def write(graph: Graph) -> Node:
        value = graph.call_function(torch.sin, (graph.placeholder("x"),))
        make = graph.call_method if isinstance(target, str) else graph.call_function
        return graph.call_function(torch.sin, (make(target, (value,)),))

    return program_of(write)


@pytest.mark.parametrize("chosen", [nn.Linear, "Linear", "torch.nn.modules.linear.Linear", nn.Module])
def test_modules_are_chosen_by_class(chosen: Any) -> None:
    root = nn.Module()
    root.add_module("layer", nn.Linear(2, 2))

    def write(graph: Graph) -> Node:
        value = graph.call_function(torch.sin, (graph.placeholder("x"),))
        return graph.call_function(torch.sin, (graph.call_module("layer", (value,)),))

    partition = AroundOperators(chosen)(program_of(write, root))
    assert [region.name for region in partition] == ["part_0", "layer", "part_1"]


class Gathering(nn.Module):
    """Sizes that only data decides, used on both sides of a chosen operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.nonzero().float()
        rows = found.size(0)
        first = torch.softmax(found.sum(1), 0)
        other = torch.ones(rows) * found[:, 0]
        return torch.softmax(other + first, 0).view(1, rows) + first


def test_sizes_that_data_decides_cross_in_order() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    module = torch.export.export(Gathering(), (x,)).module()
    assert isinstance(module, GraphModule)
    program = Program.of(module)
    plan = partita.plan(program, AroundOperators("aten.softmax"), Call())
    assert sum(region.label == "chosen" for region in plan.partition) == 2
    assert torch.equal(plan.apply().module()(x), module(x))
