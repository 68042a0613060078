"""Steps of several graphs in one budget: measured peaks are at most what was asked, in every kind of step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

from partita.errors import BudgetError
from partita.memory import Rates, measured_peak
from partita.memory.joint.plan import JointMemoryPlan
from partita.memory.joint.step_plan import StepMemoryPlan
from partita.torch_compile import steps
from partita.torch_compile.peak import FittedGraph

RATES = Rates(matmul_flops=1e12, attention_flops=1e12, bytes=1e11, call=5e-6)
_WIDTH, _ROWS = 32, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.down(functional.gelu(self.up(x))))
        return found


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(_WIDTH, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(x), labels)


class Broken(nn.Module):
    """A model in three graphs, of which the second has two blocks; the middle may run without gradients."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.head = Block(), nn.Sequential(Block(), Block()), Head()
        self.frozen = frozen

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen):
            x = self.first(x)
        torch._dynamo.graph_break()
        x = self.middle(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.head(x, labels)
        return loss


class Layers(nn.Module):
    """A model whose blocks are compiled one by one; the rest runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(5)), Head()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in (*self.blocks, self.head):
            x = block(x, labels) if block is self.head else block(x)
        return x


@pytest.fixture(autouse=True)
def _forget_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _batch(rows: int = _ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, _WIDTH), torch.randint(10, (rows,))


def _made(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).train()


def _options(peak: str | float, plans: list[Any], **more: Any) -> dict[str, Any]:
    return {"peak": peak, "inner": "aot_eager", "rates": RATES, "on_plan": plans.append, **more}


def _compiled(model: nn.Module, peak: str | float, plans: list[Any], **more: Any) -> Any:
    return torch.compile(model, backend="partita", options=_options(peak, plans, **more))


def _step_plans(plans: list[Any]) -> list[StepMemoryPlan]:
    return [plan for plan in plans if isinstance(plan, StepMemoryPlan)]


def _train(
    called: Callable[..., Tensor], model: nn.Module, batch: tuple[Tensor, Tensor], count: int = 3
) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(count):
        loss = called(*batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _peak(step: Callable[[], object], model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    model.zero_grad()
    return measured_peak(step, (*model.parameters(), *batch))


def _check(called: Any, model: nn.Module, plans: list[Any]) -> StepMemoryPlan:
    """The last plan, by which the step takes what is predicted and no more than allowed."""
    plan, batch = _step_plans(plans)[-1], _batch()
    measured = _peak(lambda: called(*batch).backward(), model, batch)
    assert measured <= plan.allowed_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.03)
    return plan


@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.slow) for part in (0.0, 0.25, 1.0)), 0.5])
def test_the_budget_of_a_model_with_graph_breaks_holds_for_the_step(part: float) -> None:
    model, plans, batch = _made(Broken), list[Any](), _batch()
    expected = _train(torch.compile(model, backend="aot_eager"), model, batch)
    torch.compiler.reset()
    smallest, plain = 720_000, 1_220_000
    model = _made(Broken)
    called = _compiled(model, int(smallest + part * (plain - smallest)), plans)
    assert _train(called, model, batch) == expected
    plan = _check(called, model, plans)
    assert len(_step_plans(plans)) == 1
    assert [one.calls for one in plan.parts] == [1, 1, 1]
    assert (plan.seconds == 0) == (part == 1.0)
    assert plan.smallest_peak_bytes <= plan.peak_bytes <= plan.plain_peak_bytes
    assert max(moment.bytes for moment in plan.moments) == plan.peak_bytes
    assert "graph 1 in middle, called once: holds" in str(plan)


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one_share_a_budget() -> None:
    model, batch = _made(Layers), _batch()
    expected = _train(model, model, batch)
    for part in (1.0, 0.7):
        torch.compiler.reset()
        model, plans = _made(Layers), list[Any]()
        options = _options(part, plans)
        for block in (*model.blocks, model.head):  # type: ignore[misc]
            block.compile(backend="partita", options=options)
        assert _train(model, model, batch) == pytest.approx(expected, rel=1e-6)
        plan = _check(model, model, plans)
        assert plan.peak_bytes <= part * plan.plain_peak_bytes
        # The input of the first block has no gradient, so that it is another graph than the others.
        assert sorted(one.calls for one in plan.parts) == [1, 1, 4]
        assert (plan.seconds == 0) == (part == 1.0)


class _Scaled(Broken):
    """Reads a number of double precision in each graph."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        torch._dynamo.graph_break()
        loss: Tensor = self.head(self.middle(x) * self.scale, labels)
        return loss


def test_graphs_with_a_number_of_double_precision_are_compiled_once_more() -> None:
    model, plans, batch = _made(_Scaled), list[Any](), _batch()
    expected = _train(torch.compile(model, backend="aot_eager"), model, batch)
    torch.compiler.reset()
    model = _made(_Scaled)
    assert _train(_compiled(model, 1_000_000, plans), model, batch) == expected
    assert _step_plans(plans)


@pytest.mark.slow
def test_the_first_step_takes_as_little_as_it_can() -> None:
    """Until the whole step is known nothing is held that can be computed again."""
    model, plans = _made(Broken), list[Any]()
    called = _compiled(model, 1.0, plans)
    called(*_batch()).backward()
    first = list(plans)
    assert all(isinstance(plan, JointMemoryPlan) and plan.seconds > 0 for plan in first[:2])
    called(*_batch()).backward()
    again = [plan for plan in plans[len(first) :] if isinstance(plan, JointMemoryPlan)]
    assert all(plan.seconds == 0 for plan in again)
    count = len(plans)
    called(*_batch()).backward()
    assert len(_step_plans(plans)) == 2  # There were gradients before these steps.
    assert len(plans) <= count + 4


@pytest.mark.slow
def test_a_budget_that_the_step_cannot_meet_is_refused_with_the_smallest() -> None:
    model, plans = _made(Broken), list[Any]()
    called, batch = _compiled(model, 650_000, plans), _batch()  # It stays allocated during the step.
    called(*batch).backward()
    model.zero_grad()
    with pytest.raises(BudgetError, match="in the whole step") as refused:
        called(*batch)
    smallest = refused.value.smallest
    assert smallest is not None
    assert not _step_plans(plans)
    torch.compiler.reset()
    model = _made(Broken)
    called = _compiled(model, smallest, plans)
    _train(called, model, batch)
    assert _check(called, model, plans).peak_bytes == smallest
    torch.compiler.reset()
    with pytest.raises(Exception, match="a part of the step, the graph in first, takes"):
        _compiled(_made(Broken), 100_000, [])(*_batch())


def test_evaluation_between_steps_changes_no_plan() -> None:
    model, plans = _made(Broken), list[Any]()
    called = _compiled(model, 0.8, plans)
    for _ in range(3):
        called(*_batch()).backward()
        model.zero_grad()
        with torch.no_grad():
            called(*_batch())
        called(*_batch())  # Its results are dropped without a backward.
    assert len(_step_plans(plans)) == 1
    _check(called, model, plans)


@pytest.mark.slow
def test_a_model_that_is_called_twice_before_its_backward_is_planned_for_that() -> None:
    model, plans, batch = _made(Broken), list[Any](), _batch()
    called = _compiled(model, 0.8, plans)

    def twice() -> None:
        (called(*batch) + called(*batch)).backward()

    for _ in range(3):
        twice()
        model.zero_grad()
    (plan,) = _step_plans(plans)
    measured = _peak(twice, model, batch)
    assert measured <= plan.allowed_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.06)
    assert [one.calls for one in plan.parts] == [2, 2, 2]


@pytest.mark.slow
def test_gradients_that_are_kept_count() -> None:
    model, plans, batch = _made(Broken), list[Any](), _batch()
    called = _compiled(model, 0.8, plans)

    def accumulate() -> None:
        for _ in range(2):
            called(*batch).backward()

    for _ in range(3):
        accumulate()
        model.zero_grad()
    first, second = _step_plans(plans)
    gradients = sum(4 * one.numel() for one in model.parameters())
    assert first.plain_peak_bytes < second.plain_peak_bytes <= first.plain_peak_bytes + gradients
    measured = _peak(accumulate, model, batch)
    assert measured <= second.allowed_bytes
    assert second.peak_bytes == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_another_batch_size_is_planned_within_the_budget() -> None:
    model, plans = _made(Broken), list[Any]()
    options = _options(1_000_000, plans)
    called = torch.compile(model, backend="partita", options=options, dynamic=False)
    for rows in (_ROWS, _ROWS, 64, 64, 64, _ROWS):
        called(*_batch(rows)).backward()
        model.zero_grad()
    small = _batch(64)
    assert _peak(lambda: called(*small).backward(), model, small) <= 1_000_000
    _check(called, model, plans)


def test_an_error_within_a_step_leaves_later_steps_right() -> None:
    model, plans = _made(Broken), list[Any]()
    called = _compiled(model, 0.8, plans)
    called(*_batch()).backward()
    model.zero_grad()
    with pytest.raises(Exception, match="size"):
        called(_batch()[0], _batch(64)[1])
    for _ in range(2):
        called(*_batch()).backward()
        model.zero_grad()
    assert len(_step_plans(plans)) == 1
    _check(called, model, plans)


def test_a_part_without_gradients_counts_with_its_parameters() -> None:
    model, plans = _made(Broken, frozen=True), list[Any]()
    called = _compiled(model, 0.9, plans)
    for _ in range(2):
        called(*_batch()).backward()
        model.zero_grad()
    plan = _check(called, model, plans)
    assert len(plan.parts) == 2


@pytest.mark.slow
def test_models_have_budgets_of_their_own_which_end_with_them() -> None:
    gc.collect()
    steps.forget_steps()
    models = [_made(Broken), _made(Broken)]
    plans: list[list[Any]] = [[], []]
    called = [_compiled(model, peak, own) for model, peak, own in zip(models, (0.75, 0.95), plans, strict=True)]
    for _ in range(2):
        for model, one in zip(models, called, strict=True):
            one(*_batch()).backward()
            model.zero_grad()
    low, high = (_check(one, model, own) for one, model, own in zip(called, models, plans, strict=True))
    assert low.peak_bytes < high.peak_bytes
    assert len(steps._STEPS) == 2
    kept = [weakref.ref(model) for model in models]
    plans.clear()
    del model, models, called, one, low, high
    torch.compiler.reset()
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert not steps._STEPS


@pytest.mark.slow
def test_a_reset_begins_anew() -> None:
    model, plans = _made(Broken), list[Any]()
    called = _compiled(model, 0.8, plans)
    _train(called, model, _batch(), 2)
    torch.compiler.reset()
    _train(called, model, _batch(), 2)
    assert len(_step_plans(plans)) == 2
    _check(called, model, plans)


def test_a_step_that_is_measured_over_its_budget_is_planned_once_more(caplog: pytest.LogCaptureFixture) -> None:
    model, plans = _made(Broken), list[Any]()
    options = _options(1_100_000, plans)
    called = torch.compile(model, backend="partita", options=options)
    expected = _train(called, model, _batch(), 2)
    shared = steps.steps_of(options)
    (first,) = _step_plans(plans)
    shared.compare(measured=1_100_000)
    assert len(_step_plans(plans)) == 1
    shared.compare(measured=1_250_000)
    assert "the step is over its budget by 150.000 kB; it is planned once more" in caplog.text
    second = _step_plans(plans)[-1]
    more = 1_250_000 - first.peak_bytes
    assert second.smallest_peak_bytes == first.smallest_peak_bytes + more
    assert second.peak_bytes <= 1_100_000
    batch = _batch()
    _peak(lambda: called(*batch).backward(), model, batch)
    assert _peak(lambda: called(*batch).backward(), model, batch) <= 1_100_000 - more
    # Only once, and where nothing fits it is the smallest peak.
    shared.compare(measured=2_000_000)
    assert _step_plans(plans)[-1] is second
    again = _made(Broken)
    assert _train(_compiled(again, 1.0, []), again, batch, 2) == expected


@pytest.mark.slow
def test_a_measured_step_that_no_plan_holds_takes_the_smallest_peak(caplog: pytest.LogCaptureFixture) -> None:
    model, plans = _made(Broken), list[Any]()
    options = _options(1_100_000, plans)
    called = torch.compile(model, backend="partita", options=options)
    _train(called, model, _batch(), 2)
    steps.steps_of(options).compare(measured=3_000_000)
    assert "no plan holds the budget of the step" in caplog.text
    plan = _step_plans(plans)[-1]
    assert plan.peak_bytes == plan.smallest_peak_bytes > 1_100_000
    called(*_batch()).backward()


def test_a_module_that_is_alone_in_its_step_is_planned_by_itself() -> None:
    """It looks like a part of a model at first, whose other parameters are not compiled."""
    model, plans = _made(Layers), list[Any]()
    model.blocks[0].compile(backend="partita", options=_options(1.0, plans))  # type: ignore[index]
    for _ in range(3):
        model(*_batch()).backward()
    careful, alone = plans
    assert careful.seconds > alone.seconds == 0
    assert not _step_plans(plans)


def test_graphs_that_are_called_without_end_are_not_recorded_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_MOST_CALLS", 5)
    model, plans = _made(Layers), list[Any]()
    options = _options(1.0, plans)
    model.blocks[1].compile(backend="partita", options=options)  # type: ignore[index]
    losses = [model(*_batch()) for _ in range(8)]
    running = steps.steps_of(options)._running
    assert len(running.events) == 5
    assert running.recorder is None
    partial(torch.autograd.backward, losses)()


def test_a_refused_step_keeps_nothing_of_the_calls_that_it_refuses() -> None:
    model = _made(Broken)
    called = _compiled(model, 650_000, [])
    called(*_batch()).backward()
    references = []
    for _ in range(2):
        batch = _batch()
        references.append(weakref.ref(batch[0]))
        with pytest.raises(BudgetError, match="in the whole step"):
            called(*batch)
        del batch
    gc.collect()
    assert [one() for one in references] == [None, None]


def test_a_kind_of_step_that_fits_as_it_is_planned_is_not_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """Steps that call their graphs in ever new ways are not compiled once more for each."""
    model, plans = _made(Broken), list[Any]()
    called, batch = _compiled(model, 0.8, plans), _batch()
    for count in (3, 3, 2, 2, 1, 1):
        caplog.clear()
        losses = [called(*batch) for _ in range(count)]
        torch.stack(losses).sum().backward()
        model.zero_grad()
    (plan,) = _step_plans(plans)
    assert [one.calls for one in plan.parts] == [3, 3, 3]
    for count in (1, 2, 3):

        def step(count: int = count) -> None:
            torch.stack([called(*batch) for _ in range(count)]).sum().backward()

        assert _peak(step, model, batch) <= plan.allowed_bytes


def test_a_plan_that_fails_to_compile_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plans, batch = _made(Broken), list[Any](), _batch()
    called = _compiled(model, 1.0, plans)
    called(*batch).backward()
    model.zero_grad()

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler today")

    with monkeypatch.context() as patched:
        patched.setattr(FittedGraph, "_compile_again", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="today"):
                called(*batch)
    for _ in range(2):
        called(*batch).backward()
        model.zero_grad()
    assert _check(called, model, plans).seconds == 0


class CompiledFunction(torch.autograd.Function):
    """What AOTAutograd calls the function of a graph."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _NoGraph:
    name, device, on_plan, communication_bytes, fixed_bytes = "none", None, None, 0, 0

    def model(self) -> None: ...
    def bytes_to_come(self) -> int:
        return 0


def test_calls_of_several_threads_have_numbers_of_their_own() -> None:
    shared, part, x = steps.Steps(), _NoGraph(), torch.ones(2, requires_grad=True)
    number = shared.adopt(part)  # type: ignore[arg-type]
    kept, numbers, errors = list[Tensor](), list[int](), list[BaseException]()

    def run() -> None:
        try:
            for _ in range(200):
                call = shared.begins(number, [x])
                kept.append(CompiledFunction.apply(x))
                call.ended(kept[-1:])
                numbers.append(call.number)
        except BaseException as error:
            errors.append(error)

    first = shared.begins(number, [x])
    kept.append(CompiledFunction.apply(x))
    first.ended(kept)
    threads, interval = [Thread(target=run) for _ in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert sorted(numbers) == list(range(1, 801))
