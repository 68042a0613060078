"""What is kept and random numbers: a backward leaves the generators of its caller alone, whatever was kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import assert_bitwise, calls_in_backward, square, step
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional

import partita
from partita import recompute
from partita.policies import ByLabel, BySize
from partita.treatments import KeepEverything, KeepOperators, Recompute

_checkpoint = recompute.wrap_activation_checkpoint


def _plainly(body: Callable[..., Any], *operands: Any) -> Any:
    return body(*operands)


def _attend(x: Tensor) -> Tensor:
    heads = x.reshape(1, 2, 4, -1)
    return functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


#: Operators that may draw, by their tags, and do not.
_CALM: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": _attend,
    "native_dropout": lambda x: torch.ops.aten.native_dropout.default(x, 0.5, False)[0],
    "rrelu": lambda x: torch.rrelu(x, 0.1, 0.3, False),
}
every_calm_operator = pytest.mark.parametrize("operator", _CALM.values(), ids=_CALM)


def _moved_by_backward(function: Callable[[], Tensor]) -> bool:
    """Whether a backward moves the random state; something is drawn between the two."""
    torch.manual_seed(0)
    y = function()
    torch.rand(3)
    before = torch.get_rng_state()
    y.sum().backward()
    return not torch.equal(before, torch.get_rng_state())


@every_calm_operator
def test_operators_that_only_may_draw_leave_the_random_state_alone(operator: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operator(x.sin()).sin()

    x = square(8)
    program = partita.capture(Model(), (x,))
    after = partita.plan(program, BySize(parts=1), Recompute(KeepEverything())).apply()
    module = after.module()
    assert not _moved_by_backward(lambda: module(x))
    partita.verify(program, after, (x,))


@every_calm_operator
def test_operators_that_only_may_draw_are_kept(operator: Any) -> None:
    def body(x: Tensor, kept: Any) -> Tensor:
        return kept(operator, x.sin()).cos()

    x = square(8)
    plain = set(calls_in_backward(body(x, _plainly))) | {"add_", "detach", "view"}
    assert set(calls_in_backward(_checkpoint(body, x, recompute.keep))) <= plain
    assert not set(calls_in_backward(_checkpoint(body, x, _plainly))) <= plain


def test_a_dropout_behind_the_region_draws_another_mask_in_each_step() -> None:
    def masks(call: Any) -> list[Tensor]:
        torch.manual_seed(1)
        found, x = [], square(8)
        for _ in range(3):
            y = _drop(call(lambda a: recompute.keep(_attend, a.sin()).exp(), x))
            y.sum().backward()
            found.append(y == 0)
        return found

    assert_bitwise(masks(partial(_checkpoint, preserve_rng_state=False)), masks(_plainly))


@pytest.mark.parametrize("preserves", [True, False])
def test_a_kept_draw_leaves_the_random_state_of_the_caller_alone(preserves: bool) -> None:
    def body(x: Tensor) -> Tensor:
        return recompute.keep(_drop, x.sin()).cos()

    x = square(8)
    assert not _moved_by_backward(lambda: _checkpoint(body, x, preserve_rng_state=preserves))
    found = step(_checkpoint, [x], body, x, preserve_rng_state=preserves)
    assert_bitwise(found, step(body, [x], x))


def test_a_kept_operator_of_somebody_else_may_draw_without_saying_so() -> None:
    library = torch.library.Library("partita_kept_draws", "DEF")
    library.define("noisy(Tensor x) -> Tensor")
    library.impl("noisy", lambda x: x + torch.rand(x.shape), "CPU")
    noisy = torch.ops.partita_kept_draws.noisy

    def body(x: Tensor, kept: Any) -> Tensor:
        return x * _drop(kept(noisy, x.detach())).sin()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x, recompute.keep), step(body, [x], x, _plainly))
    library._destroy()


def test_what_is_kept_of_inference_tensors_is_found_again() -> None:
    def model(x: Tensor, made: Tensor) -> Tensor:
        return torch.dropout(made, 0.5, True) * x.mul(2).add_(1).sin()

    x = square()
    with torch.inference_mode():
        made = x.cos()
    program = partita.Program.of(symbolic_trace(model))
    after = partita.plan(program, ByLabel(lambda node: "whole"), Recompute(KeepOperators(torch.dropout))).apply()
    # A body that writes runs again on copies, which are no inference tensors: autograd takes dropout apart for these.
    assert_bitwise(step(after.module(), [x], x, made), step(model, [x], x, made))
    assert calls_in_backward(after.module()(x, made))["bernoulli_"] == 0
