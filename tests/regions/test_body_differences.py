"""Differences of bodies: what keeps regions with the same operators from sharing a body is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

import partita
from partita import Partition, Program, Region
from partita.policies import ByModule, BySize
from partita.regions.equal_bodies import body_numbers
from partita.testing import Case, captured_programs
from partita.treatments import Call


class Block(nn.Module):
    def __init__(self, *, eps: float = 1e-5, dropout: float = 0.0, inner: int = 4, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.dropout, self.frozen = nn.LayerNorm(4, eps=eps), dropout, frozen
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.frozen else nullcontext():
            return x + functional.dropout(self.down(self.up(self.norm(x)).relu()), self.dropout)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _tied() -> Block:
    block = Block()
    block.down.weight = block.up.weight
    return block


def _bodies(*blocks: nn.Module) -> tuple[Any, ...]:
    program = partita.capture(Stack(*blocks), (torch.linspace(-1, 1, 8).reshape(2, 4),))
    return partita.plan(program, ByModule("blocks.*"), Call()).bodies()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: Block(eps=1e-3), "eps of layer_norm_2 is 0.001, of layer_norm 1e-05"),
        (lambda: Block(dropout=0.25), "p of dropout_2 is 0.25, of dropout 0.0"),
        (lambda: Block(inner=8), "linear_4 reads f32[8, 4], linear f32[4, 4]"),
        (lambda: Block(frozen=True), "layer_norm_2 runs under no_grad, layer_norm under the caller's modes"),
        (_tied, "inputs of linear_4 and linear share memory with other inputs in one of the two alone"),
    ],
)
def test_the_difference_of_a_block_is_named(other: Callable[[], Block], difference: str) -> None:
    equal, unlike = _bodies(Block(), Block(), other())
    assert (equal.calls, equal.like, equal.difference) == (2, "", "")
    assert (unlike.calls, unlike.like, unlike.difference) == (1, equal.name, difference)
    assert str(unlike) == f"{unlike.name}: 1 call of 6 nodes, like {equal.name}, but {difference}"


def test_a_printed_plan_has_a_body_that_is_nearly_equal() -> None:
    program = partita.capture(Stack(Block(), Block(eps=1e-3), Block(eps=1e-2)), (torch.ones(2, 4),))
    printed = str(partita.plan(program, ByModule("blocks.*"), Call()))
    assert "like blocks_0, but eps of layer_norm_1 is 0.001, of layer_norm 1e-05; 2 more" in printed


def test_bodies_that_share_a_label_are_told_apart_by_name() -> None:
    program = partita.capture(Stack(Block(), Block(eps=1e-3)), (torch.ones(2, 4),))
    regions = [Region(region.name, region.nodes, "block") for region in ByModule("blocks.*")(program)]
    first, second = partita.plan(program, Partition(program, regions), Call()).bodies()
    assert (first.name, second.name, second.like) == ("blocks_0", "blocks_1", "blocks_0")


def test_other_operators_are_no_difference() -> None:
    class Longer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    assert [body.difference for body in _bodies(Block(), Longer())] == ["", ""]


def _difference(functions: list[Any], returned: Callable[[list[Node]], Any]) -> str:
    """What `plan.bodies()` says of the second half of a chain of functions, beside the first."""
    graph = Graph()
    made = [graph.placeholder("x")]
    for function in functions:
        made.append(function(graph, made))
    graph.output(returned(made))
    program, half = Program.of(GraphModule({}, graph)), len(functions) // 2
    regions = [Region("one", made[1 : half + 1]), Region("other", made[half + 1 :])]
    bodies = partita.plan(program, Partition(program, regions), Call()).bodies()
    return "" if len(bodies) == 1 else str(bodies[1].difference)


def _sine(graph: Graph, made: list[Node]) -> Node:
    return graph.call_function(torch.sin, (made[-1],))


def test_a_value_that_is_read_outside_is_a_difference() -> None:
    chain = [_sine] * 4
    assert _difference(chain, lambda made: made[-1]) == ""
    assert _difference(chain, lambda made: made[-2:]) == "sin_2 is read outside of its region, sin is not"
    assert _difference(chain, lambda made: (made[1], made[-1])) == "sin is read outside of its region, sin_2 is not"


def test_the_order_in_which_values_are_read_is_a_difference() -> None:
    def product(first: int, second: int) -> Callable[[Graph, list[Node]], Node]:
        return lambda graph, made: graph.call_function(torch.mul, (made[first], made[second]))

    halves = [_sine, product(-2, -1), _sine, product(-1, -2)]
    assert _difference(halves, lambda made: made[-1]) == "mul_1 and mul read values in another order, or one twice"
    halves = [_sine, product(-2, -1), _sine, product(-1, -1)]
    assert _difference(halves, lambda made: made[-1]) == "mul_1 and mul read values in another order, or one twice"


def test_arguments_without_a_name_are_counted() -> None:
    def scaled(factor: float) -> Callable[[Graph, list[Node]], Node]:
        return lambda graph, made: graph.call_function(torch.where, (made[-1], factor, made[-1]))

    assert (
        _difference([scaled(1.0), scaled(2.0)], lambda made: made[-1]) == "argument 2 of where_1 is 2.0, of where 1.0"
    )


@given(captured_programs())
@settings(max_examples=25, deadline=None)
def test_every_body_that_is_like_another_differs_in_something(case: Case) -> None:
    program = Program.of(case.graph_module)
    partition = BySize(operators=2)(program)
    bodies = partita.plan(program, partition, Call()).bodies()
    assert len(bodies) == len(set(body_numbers(partition)))
    named = {body.name: body for body in bodies}
    for body in bodies:
        assert bool(body.like) == bool(body.difference)
        assert not body.like or named[body.like].nodes == body.nodes
