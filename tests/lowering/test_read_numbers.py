"""Numbers that a lowered region reads from memory: those of the call, also where the memory is written since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import plan_of
from torch import Tensor, nn

from partita import capture, plan, verify
from partita.policies import ByCapability
from partita.treatments import Lower


def view_of_an_input(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    filled = x.narrow(0, 0, count.item())
    count.add_(1)
    return filled, count * 1


def slices(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = count.item()
    count.add_(1)
    return x[:rows], x[1 : rows + 1]


def view_and_number(count: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    rows = count.item()
    count.add_(1)
    return x.narrow(0, rows, 1), rows


def view_of_a_result(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    made, rows = x * 2, count.item()
    count.add_(1)
    return made, made.narrow(0, 0, rows)


def computed_number(count: Tensor, x: Tensor) -> Tensor:
    return x.narrow(0, 0, (count * 2).item())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "function", [view_of_an_input, slices, view_and_number, view_of_a_result, computed_number], ids=lambda f: f.__name__
)
def test_a_view_is_where_the_number_said_before_it_was_mutated(function: Callable[..., Any], backend: str) -> None:
    program = program_of(function)
    decided = plan_of(program, Lower(backend))
    verify(program, decided.apply(), (torch.tensor(2), torch.randn(6, 3, requires_grad=True)))
    assert not decided.failures


def test_a_place_that_a_tensor_gives_is_not_read_again() -> None:
    def place_of_a_tensor(start: Tensor, x: Tensor) -> Tensor:
        rows = torch.narrow(x, 0, start, 2)
        start.add_(1)
        return rows

    program = program_of(place_of_a_tensor)
    verify(program, plan_of(program, Lower("aot_eager")).apply(), (torch.tensor(2), torch.randn(6)))


def test_a_cache_that_counts_gives_what_was_filled_before() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(2))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.count.item()
            torch._check(rows >= 0)
            torch._check(rows <= x.shape[0])
            filled = x[:rows]
            self.count.add_(1)
            return filled

    program = capture(Cache(), (torch.arange(6.0),))
    decided = plan(program, ByCapability("aot_eager"), Lower("aot_eager"))
    module = decided.apply().module()
    assert [len(module(torch.arange(6.0))) for _ in range(3)] == [2, 3, 4]
    assert len(decided.partition) == 1
    assert not decided.failures
