"""Plans of joint graphs: which values are saved, for any number of bytes."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import partita
from partita.errors import BudgetError
from partita.memory import Rates
from partita.memory.joint.plan import JointPlanner, JointStep

RATES = Rates(matmul_flops=1e12, attention_flops=1e12, bytes=1e11, call=5e-6)


class Blocks(nn.Module):
    """Blocks of several widths; with dropout they read the input again, so that segments share values."""

    def __init__(self, widths: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, one), nn.GELU()) for one in widths)
        self.down = nn.ModuleList(nn.Linear(one, 16) for one in widths)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for up, down in zip(self.up, self.down, strict=True):
            x = x + functional.dropout(down(up(x)), self.dropout) * (first if self.dropout else 1)
        return x.square().mean()


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("widths", [(48,) * 8, (48, 48, 64, 48, 48, 48, 48, 48)])
def test_less_memory_never_means_more_memory_nor_less_time(
    widths: tuple[int, ...], dropout: float, fuses: bool
) -> None:
    program = partita.capture_joint(Blocks(widths, dropout), (torch.randn(128, 16),))
    planner = JointPlanner(program, JointStep(RATES, fuses=fuses))
    least, most, source = planner.smallest_peak, planner.plain.peak, Random(1)
    budgets = sorted({least, most, *(source.randint(least, most) for _ in range(150))})
    plans = [planner.plan(budget) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    peaks, seconds = [plan.peak_bytes for plan in plans], [plan.seconds for plan in plans]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(peaks)) > 5
    assert planner.plan(least).peak_bytes == least
    with pytest.raises(BudgetError):
        planner.plan(least - 1)
