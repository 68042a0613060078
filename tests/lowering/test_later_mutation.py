"""Writes after a lowered region has run: its backward is that of plain torch, whatever compiled code keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, lowered, region_of
from torch import Tensor
from torch.fx import GraphModule, Node

from partita import Tolerance, capture, hops, plan, verify
from partita.policies import ByLabel, ByMode
from partita.treatments import Lower, Mode


class KeepsInput(torch.autograd.Function):
    """`cos(sin(2 x))`, which recomputes in its backward, as Inductor does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 2).sin().cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * -(x * 2).sin().sin() * (x * 2).cos() * 2


class KeepsOutput(torch.autograd.Function):
    """`x * x` of positive numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * x
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * 2 * result.sqrt()


@dataclass(frozen=True)
class Keeping(Counting):
    """A compiler that has one function for everything."""

    function: Callable[..., Tensor] = KeepsInput.apply
    tolerance = Tolerance(relative=1e-5, absolute=1e-6)

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        self.made.append(list(inputs))
        return lambda *values: (self.function(*values),)


def labels(*names: str) -> Callable[[Node], str | None]:
    return lambda node: "region" if node.name in names else None


def read_then_written(x: Tensor) -> tuple[Tensor, Tensor]:
    given = x + 1
    found = (given * 2).sin().cos()
    given.mul_(3)
    return found, given


def read_then_written_through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    given = x + 1
    view = given.view(2, -1)
    found = (given * 2).sin().cos()
    view.mul_(3)
    return found, given


@pytest.mark.parametrize("function", [read_then_written, read_then_written_through_a_view])
@pytest.mark.parametrize(
    "backend", [Keeping(), pytest.param("inductor", marks=pytest.mark.slow)], ids=["own", "inductor"]
)
def test_an_input_that_is_mutated_later_is_saved_for_the_backward(function: Callable[..., Any], backend: Any) -> None:
    program = program_of(function)
    after = plan(program, ByLabel(labels("mul", "sin", "cos")), Lower(backend)).apply()
    verify(program, after, (torch.randn(8, requires_grad=True),))


def test_an_input_that_was_mutated_before_is_not_copied() -> None:
    def written_then_read(x: Tensor) -> Tensor:
        given = x + 1
        given.mul_(3)
        return (given * 2).sin().cos()

    program = program_of(written_then_read)
    module = plan(program, ByLabel(labels("mul", "sin", "cos")), Lower(Keeping())).apply().module()
    module(torch.randn(8, requires_grad=True)).sum().backward()
    (variant,) = region_of(module)._variants._functions
    assert variant.dry_run is not None
    assert variant.dry_run.copied_inputs == ()


def test_equal_bodies_share_no_function_where_one_is_mutated_later() -> None:
    def squares(x: Tensor) -> Tensor:
        first = x * x
        second = torch.exp(first)
        third = second * second
        third.mul_(3)
        return third

    program = program_of(squares)
    places = {"mul": "first", "mul_1": "second"}
    backend = Keeping(function=KeepsOutput.apply)
    after = plan(program, ByLabel(lambda node: places.get(node.name)), Lower(backend)).apply()
    verify(program, after, (torch.rand(4, requires_grad=True),))


@pytest.mark.parametrize("first_twice", [False, True])
def test_an_input_that_nothing_used_depends_on_gets_no_gradient_whatever_came_first(first_twice: bool) -> None:
    module = lowered(lambda x, y: (x * 2, y * 3), Lower(Counting()))
    if first_twice:
        x = torch.randn(3, requires_grad=True)
        first, second = module(x, x)
        (first + second).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 5.0))
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    module(x, y)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert y.grad is None


class Halves(torch.nn.Module):
    """Mutates a tensor after it was split, and then one of the halves, where autograd need not follow."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x * 2
        half = whole.split(2)[1]
        whole.add_(1)
        with torch.no_grad():
            half.mul_(2)
        return whole


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_that_autograd_does_not_tell_of_goes_to_the_body(grad: bool) -> None:
    program = plan(capture(Halves(), (torch.ones(4, 3),)), ByMode(), Mode()).apply()
    writing = ByLabel(lambda node: "write" if node.target is hops.wrap_with_set_grad_enabled else None)
    planned = plan(program, writing, Lower("aot_eager"))
    assert len(planned.partition) == 1
    x = torch.arange(12.0).reshape(4, 3).requires_grad_(grad)
    verify(program, planned.apply(), (x,))
    assert not planned.failures
