"""Unused nodes with side effects stay in the bodies of operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from partita import Program, capture, hops, plan, verify
from partita.policies import ByMode
from partita.treatments import Mode


class Unread(nn.Module):
    """Mutates the statistics of a batch norm and generates random numbers; both results are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm(x)
            torch.rand_like(x)
            doubled = x * 2
        return doubled + torch.rand_like(x)


X = torch.randn(4, 4)


def cleaned(module: Any) -> Any:
    module = copy.deepcopy(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


@pytest.mark.parametrize("operators", ["partita", "torch"])
def test_dead_code_elimination_keeps_them_in_bodies(operators: Any) -> None:
    model = Unread()
    program = plan(capture(model, (X,)), ByMode(), Mode(operators)).apply()
    before = model.norm.running_mean.clone()
    module = cleaned(program.module())
    module(X)
    assert not torch.equal(module.norm.running_mean, before)
    targets = [str(node.target) for part in module.modules() if hasattr(part, "graph") for node in part.graph.nodes]
    assert targets.count("aten.rand_like.default") == 2


def test_capturing_a_captured_program_keeps_them() -> None:
    model = Unread()
    verify(model, capture(capture(model, (X,)).module(), (X,)), (X,))


def test_exporting_a_captured_program_keeps_them() -> None:
    model = Unread()
    verify(model, Program.of(torch.export.export(capture(model, (X,)).module(), (X,))), (X,))


def test_a_body_of_the_users_own_keeps_them() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def body(x: torch.Tensor) -> torch.Tensor:
                self.norm(x)
                return x * 2

            return hops.wrap_with_set_grad_enabled(False, body, x)

    model = Own()
    verify(model, capture(model, (X,)), (X,))
