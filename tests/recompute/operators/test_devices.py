"""Checkpoints on an accelerator: its generators are preserved wherever a body finds tensors of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import Block, assert_bitwise, every_operator
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional

import partita
from partita import recompute
from partita.policies import BySize
from partita.treatments import KeepEverything, KeepNothing, KeepOperators, Recompute

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")


def _gradients(call: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    result = call()
    return [result, *torch.autograd.grad(result.float().square().sum(), leaves), torch.rand(2, device="cuda")]


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


@every_operator
def test_masks_are_drawn_once_whatever_a_body_is_given(operator: Any) -> None:
    weight = torch.linspace(-1, 1, 64, device="cuda").reshape(8, 8).requires_grad_()
    block = Block(8).cuda()
    written = symbolic_trace(lambda a: functional.dropout(a.mul_(2).sin(), 0.5, True).exp())
    bodies = {
        "an operand": lambda run: run(lambda a: _drop(a @ weight).sin(), weight),
        "nothing but state": lambda run: run(lambda: _drop(weight.sin()).exp()),
        "an operand elsewhere": lambda run: run(lambda a: _drop(weight * a.cuda()).exp(), torch.ones(8, 8)),
        "an operand that is written": lambda run: run(written, weight * 1),
        "a module": lambda run: run(block, weight),
        "a kept draw": lambda run: run(lambda a: _drop(recompute.keep(_drop, a.sin()).exp()), weight),
    }
    for name, call in bodies.items():
        found = _gradients(lambda call=call: call(operator), [weight])
        expected = _gradients(lambda call=call: call(lambda body, *args: body(*args)), [weight])
        assert len(found) == len(expected), name
        assert_bitwise(found, expected)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.block(x)), 0.5, self.training).sin()


@pytest.mark.parametrize("keep", [KeepNothing(), KeepEverything(), KeepOperators("aten.linear", "aten.dropout")])
def test_regions_that_draw_and_write_are_verified(keep: Any) -> None:
    x = torch.randn(16, 8, device="cuda")
    program = partita.capture(Normed().cuda(), (x,))
    for parts in (1, 3):
        after = partita.plan(program, BySize(parts=parts), Recompute(keep)).apply()
        partita.verify(program, after, (x.clone().requires_grad_(),))
