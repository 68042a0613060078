"""Chapter: a training step of the transformer is fitted into fewer bytes, predicted and then measured."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional

import partita
from partita.memory import MemoryPlan, Rates, measured_peak, step_memory
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "A training step that fits into fewer bytes"

_BUDGET = 0.6
#: Of no device in particular, so that the plan is the same everywhere; without them they are measured.
_RATES = Rates(matmul_flops=5e10, attention_flops=2e10, bytes=1e10, call=1e-5)


class Step(nn.Module):
    """The decoder with its loss on the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(ids)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def show() -> bool:
    """Shows the plan and its timeline, and measures a step; returns whether it fits, with the same gradients."""
    _, ids, plan = fitted()
    print(f"at most {_BUDGET:.0%} of the plain step, the fastest plan that is found:\n\n{plan}\n")
    print(plan.picture().text(80))
    module = plan.module()
    measured = measured_peak(lambda: module(ids).backward(), [*module.parameters(), *module.buffers(), ids])
    comparison = compared()
    print(f"\npredicted {plan.peak_bytes:,} bytes, measured {measured:,}; compared, with dropout: {comparison}")
    return comparison.equal and measured <= plan.budget_bytes < plan.plain_peak_bytes


@cache
def fitted() -> tuple[Step, torch.Tensor, MemoryPlan]:
    """The model, its input and the plan."""
    torch.manual_seed(0)
    model, ids = Step().train(), torch.randint(WORDS, (4, 64))
    return model, ids, step_memory(model, (ids,), rates=_RATES).plan(_BUDGET)


@cache
def compared() -> partita.Comparison:
    """The step as planned beside the plain one."""
    _, ids, plan = fitted()
    return partita.compare(plan.chain.program, plan.program, (ids,))
