"""Calls of `torch.utils.checkpoint` in a model: planned like all else, or recomputed in every plan, as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.memory.models import RATES, Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partita
from partita.errors import OptionError
from partita.memory import budget_curve, measured_peak, step_memory
from partita.torch_compile import backend, memory_partition
from partita.torch_compile.options import BackendOptions

_X, _Y = torch.randn(128, 32), torch.randint(16, (128,))


class _Model(nn.Module):
    """Every other block is checkpointed; `deep` puts two of them into one call, one of them once more."""

    def __init__(self, *, deep: bool = False, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(depth))
        self.head = nn.Linear(32, 16)
        self.deep = deep

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.deep:
            x = checkpoint(self._two, x, use_reentrant=False)
            blocks = list(self.blocks)[2:]
        else:
            blocks = list(self.blocks)
        for number, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 == 0 else block(x)
        return nn.functional.cross_entropy(self.head(x), y)

    def _two(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=False))
        return found


def _model(**options: Any) -> _Model:
    torch.manual_seed(0)
    return _Model(**options).train()


def _train(module: Callable[..., Tensor], model: nn.Module, *, measures: bool = True) -> tuple[int, list[Tensor]]:
    """The measured peak of a step, and its gradients."""
    model.zero_grad()

    def step() -> None:
        torch.manual_seed(1)
        module(_X, _Y).backward()

    if measures:
        peak = measured_peak(step, (*model.parameters(), _X, _Y))
    else:  # Dynamo compiles nothing while operators are recorded.
        peak = 0
        step()
    return peak, [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("deep", [False, True])
def test_respected_checkpoints_are_recomputed_in_every_plan(deep: bool) -> None:
    model = _model(deep=deep)
    measured, expected = _train(model, model)
    step = step_memory(model, (_X, _Y), rates=RATES, checkpoints="respect")
    # The plain step is the model as it is written, with its checkpoints; a call inside of another one is part of it.
    assert step.plain_peak_bytes >= measured
    assert deep or step.plain_peak_bytes == pytest.approx(measured, abs=16)
    assert deep or step.smallest_peak_bytes < step.plain_peak_bytes
    for peak in (1.0, step.smallest_peak_bytes):
        plan = step.plan(peak)
        checkpoints = [one for one in plan.segments if one.name.startswith("checkpoint")]
        assert len(checkpoints) == 2
        assert all(one.is_recomputed and not one.kept for one in checkpoints)
        found, gradients = _train(plan.module(), model)
        assert found <= plan.budget_bytes
        assert plan.timeline.peak_bytes == plan.peak_bytes == pytest.approx(found, abs=16)
        assert all(map(torch.equal, gradients, expected))
    assert not any(one.is_recomputed for one in step.plan(1.0).segments if not one.name.startswith("checkpoint"))


def test_checkpoints_are_planned_anew_by_default() -> None:
    model = _model()
    measured, expected = _train(model, model)
    step = step_memory(model, (_X, _Y), rates=RATES)
    assert step.plain_peak_bytes > 1.1 * measured
    fitted = partita.fit(model, (_X, _Y), peak=step.plain_peak_bytes, rates=RATES)
    assert not any(one.is_recomputed for one in fitted.memory_plan.segments)
    assert all(map(torch.equal, _train(fitted, model)[1], expected))


def test_compiled_steps_respect_checkpoints_too() -> None:
    model = _model()
    torch.compiler.reset()
    expected = _train(torch.compile(model, backend="aot_eager"), model, measures=False)[1]
    peaks = {}
    for checkpoints in ("replan", "respect"):
        torch.compiler.reset()
        plans: list[Any] = []
        options = {"peak": 1.0, "inner": "aot_eager", "rates": RATES, "checkpoints": checkpoints}
        compiled = torch.compile(model, backend=backend, options={**options, "on_plan": plans.append})
        assert all(map(torch.equal, _train(compiled, model, measures=False)[1], expected))
        (plan,) = plans
        peaks[checkpoints] = plan.peak_bytes
        saved = [node.name for node in plan.saved if "gelu" in node.name]
        assert len(saved) == (4 if checkpoints == "replan" else 2)
    assert peaks["respect"] < 0.8 * peaks["replan"]


def test_a_model_without_checkpoints_is_planned_the_same() -> None:
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    whole = nn.Sequential(model, nn.Flatten(0), nn.Softmax(0), nn.Linear(128 * 32, 1), nn.Flatten(0))
    plans = [budget_curve(whole, (_X,), rates=RATES, points=2, checkpoints=one) for one in ("replan", "respect")]
    assert [plan.peak_bytes for plan in plans[0]] == [plan.peak_bytes for plan in plans[1]]


@pytest.mark.parametrize("checkpoints", ["keep", None, True])
def test_checkpoints_are_respected_or_replanned(checkpoints: Any) -> None:
    for call in (
        lambda: partita.fit(_model(), (_X, _Y), peak=0.5, rates=RATES, checkpoints=checkpoints),
        lambda: BackendOptions.read({"peak": 0.5, "checkpoints": checkpoints}),
        lambda: memory_partition(0.5, checkpoints=checkpoints),
    ):
        with pytest.raises(OptionError, match=r"'replan'.*'respect'"):
            call()
    with pytest.raises(OptionError, match="for steps that fit a 'peak'"):
        BackendOptions.read({"checkpoints": "respect"})
