"""Budgets, models and calls that a plan cannot or need not help: a clear error, or a right step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.memory.models import RATES, Block, Model
from torch import Tensor, nn

import partita
from partita.errors import BudgetError, CaptureError, PartitaError
from partita.memory import budget_curve, step_memory
from partita.memory.budget import check_device_has
from partita.torch_compile import backend

_X, _Y = torch.randn(256, 32), torch.randint(16, (256,))


def _gradients(model: nn.Module, *steps: Callable[[], Tensor]) -> list[Tensor]:
    """The gradients of the sum of several losses, all computed before the backward."""
    model.zero_grad()
    torch.manual_seed(1)
    torch.stack([step() for step in steps]).sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def _compiled(model: nn.Module, plans: list[Any], peak: Any = 0.8) -> Any:
    torch.compiler.reset()
    options = {"peak": peak, "inner": "aot_eager", "rates": RATES, "on_plan": plans.append}
    return torch.compile(model, backend=backend, options=options)


@pytest.mark.parametrize("peak", [0, -1, "0B", 0.0, -0.3, "12 parsecs", "", None, [5], float("nan")])
def test_a_budget_that_is_none_is_refused_before_any_work(peak: Any) -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model ran")

    with pytest.raises(PartitaError):
        partita.fit(Never(), (_X,), peak=peak, rates=RATES)
    with pytest.raises(PartitaError):
        backend(torch.fx.symbolic_trace(nn.ReLU()), (_X,), options={"peak": peak} if peak is not None else {"peak": []})


def test_a_percentage_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(PartitaError, match=r"as a part of what the plain step takes: the number 0\.6"):
        partita.fit(Model(depth=2), (_X, _Y), peak="60%", rates=RATES)


def test_a_budget_over_what_the_device_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    check_device_has(80 * 10**9, torch.device("cuda", 0))
    with pytest.raises(BudgetError, match=r"more than cuda:0 has, 80\.000 GB; ask for less"):
        check_device_has(81 * 10**9, torch.device("cuda", 0))


def test_a_budget_over_what_the_step_takes_leaves_it_as_it_is() -> None:
    model = Model(depth=2)
    for peak in ("1TB", 1.0):
        plan = partita.fit(model, (_X, _Y), peak=peak, rates=RATES).memory_plan
        assert not any(segment.is_recomputed for segment in plan.segments)
        assert plan.extra_seconds == 0
    plans: list[Any] = []
    _compiled(model, plans, "1TB")(_X, _Y).backward()
    assert plans[0].peak_bytes == plans[0].plain_peak_bytes


def test_parameters_that_alone_do_not_fit_are_named() -> None:
    model = Model(depth=2)
    parameters = sum(4 * one.numel() for one in model.parameters())
    with pytest.raises(BudgetError, match=r"alone take .* shard the model.* smallest peak is") as refused:
        partita.fit(model, (_X, _Y), peak=parameters, rates=RATES)
    assert refused.value.smallest == step_memory(model, (_X, _Y), rates=RATES).smallest_peak_bytes
    with pytest.raises(Exception, match="shard the model"):
        _compiled(model, [], parameters)(_X, _Y)


def test_a_model_that_is_called_twice_before_its_backward_keeps_its_bits() -> None:
    torch.manual_seed(0)
    model = Model(depth=3)
    other = _X.flip(0)
    expected = _gradients(model, lambda: model(_X, _Y), lambda: model(other, _Y))
    fitted = partita.fit(model, (_X, _Y), peak=0.7, rates=RATES)
    assert any(segment.is_recomputed for segment in fitted.memory_plan.segments)
    found = _gradients(model, lambda: fitted(_X, _Y), lambda: fitted(other, _Y))
    assert all(map(torch.equal, found, expected))
    plain, plans = torch.compile(model, backend="aot_eager"), list[Any]()
    torch.compiler.reset()
    expected = _gradients(model, lambda: plain(_X, _Y), lambda: plain(other, _Y))
    compiled = _compiled(model, plans)
    found = _gradients(model, lambda: compiled(_X, _Y), lambda: compiled(other, _Y))
    assert len(plans) == 1
    assert all(map(torch.equal, found, expected))


class _Broken(nn.Module):
    """Breaks the graph of Dynamo between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(32), Block(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > 1e9:
            x = x * 2
        return self.second(x).square().mean()


def test_graph_breaks_are_refused_in_eager_mode_and_leave_compiled_gradients_right() -> None:
    torch.manual_seed(0)
    model = _Broken()
    with pytest.raises(CaptureError, match="_Broken"):
        partita.fit(model, (_X,), peak=0.7, rates=RATES)
    plain, plans = torch.compile(model, backend="aot_eager"), list[Any]()
    torch.compiler.reset()
    expected = _gradients(model, lambda: plain(_X))
    compiled = _compiled(model, plans, 0.95)
    found = _gradients(model, lambda: compiled(_X))
    assert len(plans) == 2
    assert all(plan.peak_bytes <= plan.allowed_bytes for plan in plans)
    assert all(map(torch.equal, found, expected))


def test_inference_needs_no_plan() -> None:
    model, plans = Model(depth=2).eval(), list[Any]()
    with torch.no_grad():
        with pytest.raises(BudgetError, match="no training step to fit"):
            partita.fit(model, (_X, _Y), peak=0.5, rates=RATES)
        with pytest.raises(BudgetError, match="no training step to fit"):
            budget_curve(model, (_X, _Y), rates=RATES)
        assert torch.equal(_compiled(model, plans)(_X, _Y), model(_X, _Y))
    assert not plans
    # A fitted model answers without gradients, too.
    fitted = partita.fit(model, (_X, _Y), peak=0.9, rates=RATES)
    with torch.no_grad():
        assert torch.equal(fitted(_X, _Y), model(_X, _Y))


def test_a_part_that_cannot_be_tried_is_named() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            saved = torch.exp(self.linear(x))
            result = saved.sin().sum()
            saved.add_(1)
            return result

    with pytest.raises(BudgetError, match="cannot be tried on fake tensors"):
        partita.fit(InPlace(), (_X,), peak=0.5, rates=RATES)


def test_a_branch_is_refused_with_a_way_out_that_plans_it() -> None:
    class Branching(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = torch.cond(x.sum() > 0, lambda value: value.sin(), lambda value: value.cos(), (x,))
            return super().forward(x, y)

    model = Branching()
    with pytest.raises(BudgetError, match=r"torch.compile\(model, backend=\"partita\", options=\{\"peak\": ...\}\)"):
        partita.fit(model, (_X, _Y), peak=0.9, rates=RATES)
    compiled = torch.compile(model, backend=backend, options={"peak": 0.9, "inner": "aot_eager", "rates": RATES})
    compiled(_X, _Y).backward()
