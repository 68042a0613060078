"""Random numbers in regions that are traced: eager's own, or the region runs eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.lowering_helpers import plan_of
from torch import Tensor, nn

from partita import Program, verify
from partita.treatments import Lower

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.5, True),
    "bernoulli_": lambda x: (x * 1).bernoulli_(),
    "dropout_": lambda x: nn.functional.dropout(x * 1, 0.5, True, True),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: (x * 1).normal_(),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
}


def lowered(draw: Callable[[Tensor], Tensor], x: Tensor, backend: str = "aot_eager") -> list[str]:
    """What could not be compiled of a program that means the same when it is lowered."""
    program = Program.of(torch.fx.symbolic_trace(draw))
    plan = plan_of(program, Lower(backend))
    verify(program, plan.apply(), (x,))
    return [failure.reason for failure in plan.failures]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_into_a_contiguous_tensor_is_traced(name: str) -> None:
    assert not lowered(DRAWS[name], torch.randn(8, 12, requires_grad=True))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_into_a_transposed_tensor_runs_eagerly(name: str) -> None:
    (reason,) = set(lowered(DRAWS[name], torch.randn(12, 8).t().requires_grad_()))
    assert "not contiguous" in reason


def test_a_draw_into_a_tensor_with_gaps_runs_eagerly() -> None:
    assert lowered(lambda x: (x * 1)[:, ::2].normal_(), torch.randn(8, 12))


def test_a_dropout_of_a_transposed_tensor_is_traced() -> None:
    assert not lowered(lambda x: nn.functional.dropout(x, 0.5, True), torch.randn(12, 8).t().requires_grad_())


def test_the_backward_of_inductor_draws_nothing() -> None:
    """torch.compile draws again there, for nothing."""
    assert not lowered(lambda x: torch.bernoulli(x.sigmoid()), torch.randn(8, 12, requires_grad=True), "inductor")
