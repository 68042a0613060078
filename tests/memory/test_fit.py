"""Training steps that fit a budget: the measured peak is the predicted one, and gradients keep their bits."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.memory.models import RATES, CrossAttention, Model
from torch import Tensor, nn

import partita
from partita.errors import BudgetError, OptionError
from partita.memory import (
    MemoryBudget,
    MemoryPlan,
    Rates,
    StepMemory,
    budget_curve,
    measure_rates,
    measured_peak,
    step_memory,
)
from partita.memory.rates import shown_milliseconds
from partita.solvers.peak import peak_of

_X, _Y = torch.randn(256, 32), torch.randint(16, (256,))


@cache
def _step() -> tuple[Model, StepMemory]:
    torch.manual_seed(0)
    model = Model().train()
    return model, step_memory(model, (_X, _Y), rates=RATES)


def _train(module: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The measured peak of a step, and its gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)

    def step() -> None:
        result = module(*args, **kwargs)
        getattr(result, "loss", result).backward()

    tensors = (*model.parameters(), *model.buffers(), *args, *kwargs.values())
    peak = measured_peak(step, tensors)
    return peak, [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def _same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    pairs = list(zip(some, others, strict=True))
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_the_measured_peak_is_predicted_and_gradients_keep_their_bits() -> None:
    model, step = _step()
    plain, expected = _train(step.chain.program.module(), model, (_X, _Y), {})
    assert step.plain_peak_bytes == pytest.approx(plain, rel=0.01)
    for part in (1.0, 0.8, 0.6, step.smallest_peak_bytes):
        plan = step.plan(part)
        peak, gradients = _train(plan.module(), model, (_X, _Y), {})
        assert peak <= plan.budget_bytes
        assert plan.peak_bytes == pytest.approx(peak, rel=0.01)
        assert _same(gradients, expected)


def test_less_memory_asked_never_means_more_used() -> None:
    _, step = _step()
    least, most = step.smallest_peak_bytes, step.plain_peak_bytes
    plans = [step.plan(least + (most - least) * at // 12) for at in range(13)]
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.6 * peaks[-1]
    seconds = [plan.extra_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0


@cache
def _deep_step() -> StepMemory:
    torch.manual_seed(0)
    return step_memory(Model(depth=8), (_X, _Y), rates=RATES)


def _check_order(plans: list[MemoryPlan]) -> None:
    """`plans` are from the smallest budget on."""
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(one.peak_bytes <= other.peak_bytes for one, other in pairwise(plans))
    assert all(one.extra_seconds >= other.extra_seconds for one, other in pairwise(plans))


@pytest.mark.parametrize("at_the_ends", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_less_memory_never_takes_more_where_segments_do_not_add_up(
    monkeypatch: pytest.MonkeyPatch, seed: int, *, at_the_ends: bool
) -> None:
    step = _deep_step()
    least, most = step.smallest_peak_bytes, step.plain_peak_bytes
    noise, known = random.Random(seed), dict[tuple[int, ...], int]()
    if not at_the_ends:
        known = dict.fromkeys(((0,) * len(step.chain.links), step.plan(least).chosen), 0)
    apart, stages = (most - least) // 32, step.chain.stages()

    def tried(self: StepMemory, chosen: tuple[int, ...]) -> int:
        peak = self.resident_bytes + peak_of(stages, chosen)
        return peak + known.setdefault(tuple(chosen), noise.randint(-apart, apart))

    monkeypatch.setattr(StepMemory, "_peak_bytes", tried)
    step = StepMemory(step.chain, step.options, step.extra_bytes, step.device)
    least, most = step.smallest_peak_bytes, step.plain_peak_bytes
    asked = [least + (most - least) * at // 30 for at in range(31)]
    plans = [step.plan(bytes_) for bytes_ in asked]
    _check_order(plans)
    assert len({plan.chosen for plan in plans}) > 4
    # Another order of calls, and another `StepMemory`, give the same plans.
    again = StepMemory(step.chain, step.options, step.extra_bytes, step.device)
    random.Random(1).shuffle(asked)
    chosen = {bytes_: again.plan(bytes_).chosen for bytes_ in asked}
    assert all(chosen[plan.budget_bytes] == plan.chosen for plan in plans)


def test_less_memory_never_takes_more_where_a_plan_cannot_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.solvers.peak._MOST_STATES", 3)
    step = _deep_step()
    step = StepMemory(step.chain, step.options, step.extra_bytes, step.device)
    least, most = step.smallest_peak_bytes, step.plain_peak_bytes
    _check_order([step.plan(least + (most - least) * at // 60) for at in range(61)])


@pytest.mark.parametrize("kind", ["blocks", "cross attention"])
def test_segments_predict_what_the_whole_step_takes(kind: str) -> None:
    step = _step()[1] if kind == "blocks" else step_memory(CrossAttention(), (_X, _Y), rates=RATES)
    asked = [1.0, 0.9, 0.8, 0.7, step.smallest_peak_bytes]
    for plan in map(step.plan, asked):
        # Both what follows from the segments, and what fills it.
        timeline = plan.timeline
        assert timeline.peak_bytes == plan.peak_bytes
        occupants = sum(one.bytes for one in timeline.occupants)
        assert timeline.resident_bytes + timeline.gradient_bytes + occupants == timeline.peak_bytes
    assert len(step.chain.links) > 3
    assert plan.peak_bytes < 0.8 * step.plain_peak_bytes


def test_a_plan_prints_what_is_done_and_what_fills_the_peak() -> None:
    _, step = _step()
    plan = step.plan(0.6)
    text = str(plan)
    assert "recompute" in text
    assert f"peak {plan.peak_bytes / 1e6:.3f} MB of {plan.budget_bytes / 1e6:.3f} MB allowed" in text
    assert f"recomputation adds {shown_milliseconds(plan.extra_seconds)} to " in text
    assert "blocks." in text
    names = {node.name for node in step.chain.program.graph.nodes}
    assert all(set(segment.kept) <= names for segment in plan.segments)
    # What fills the peak is named by a node and its module, and adds up.
    timeline = plan.timeline
    assert all(one.node in names for one in timeline.occupants if one.node)


def test_fit_gives_a_module_like_the_model() -> None:
    model, _ = _step()
    fitted = partita.fit(model, (_X, _Y), peak=0.7, rates=RATES)
    assert {id(one) for one in fitted.parameters()} == {id(one) for one in model.parameters()}
    torch.manual_seed(3)
    expected = model(_X, _Y)
    torch.manual_seed(3)
    assert torch.equal(fitted(_X, _Y), expected)
    assert fitted.memory_plan.peak_bytes <= 0.7 * fitted.memory_plan.plain_peak_bytes


def test_a_fitted_module_can_be_copied_and_pickled() -> None:
    model, _ = _step()
    fitted = partita.fit(model, (_X, _Y), peak=0.7, rates=RATES)
    copied, loaded = copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))
    results = []
    for module in (fitted, copied, loaded):
        torch.manual_seed(3)
        results.append(module(_X, _Y))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert copied.memory_plan is fitted.memory_plan
    assert str(loaded.memory_plan) == str(fitted.memory_plan)
    assert loaded.memory_plan.peak_bytes == fitted.memory_plan.peak_bytes


class Casting(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


class Counting(Model):
    """Its backward reads a buffer that it mutates with `+=`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x / self.calls, y) / self.calls


@pytest.mark.parametrize("kind", [Casting, Counting])
def test_blocks_with_modes_and_counters_fit(kind: type[Model]) -> None:
    """Products are kept first, since they take longest to recompute."""
    torch.manual_seed(0)
    model = kind()
    step = step_memory(model, (_X, _Y), rates=RATES)
    found = step.plan((step.smallest_peak_bytes + step.plain_peak_bytes) // 2)
    kept = {name for segment in found.segments for name in segment.kept}
    assert any(name.startswith("linear") for name in kept), kept
    plain = _train(model, model, (_X, _Y), {})[1]
    for buffer in model.buffers():
        buffer.zero_()
    peak, gradients = _train(found.module(), model, (_X, _Y), {})
    assert abs(peak - found.peak_bytes) <= 16
    assert _same(gradients, plain)


def test_the_state_of_an_optimizer_counts() -> None:
    model, step = _step()
    parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with_state = step_memory(model, (_X, _Y), rates=RATES, optimizer=optimizer)
    assert with_state.plain_peak_bytes == step.plain_peak_bytes + 2 * parameters
    with pytest.raises(OptionError, match="from 0 on"):
        step_memory(model, (_X, _Y), rates=RATES, optimizer=-1)


def test_a_curve_goes_from_the_smallest_peak_to_the_plain_one() -> None:
    _, step = _step()
    curve = step.curve(4)
    assert curve[0].peak_bytes == step.smallest_peak_bytes
    assert curve[-1].peak_bytes == step.plain_peak_bytes
    assert [plan.extra_seconds for plan in curve] == sorted((plan.extra_seconds for plan in curve), reverse=True)
    with pytest.raises(OptionError, match="at least 2 points"):
        step.curve(1)


@pytest.mark.parametrize("peak", [0, -5, "0GB", "-5GB", 0.0, -0.5])
def test_a_budget_is_above_zero(peak: Any) -> None:
    with pytest.raises(BudgetError, match="above zero"):
        MemoryBudget(peak)


@pytest.mark.parametrize(
    "peak", ["11XB", "GB", "", None, True, float("nan"), float("inf"), [1], 1.5, 80.0, 10**400, "9" * 400 + "GB"]
)
def test_a_budget_is_a_number_of_bytes(peak: Any) -> None:
    with pytest.raises(OptionError):
        MemoryBudget(peak)


@pytest.mark.parametrize(
    ("peak", "bytes_"),
    [
        ("11GB", 11 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (1_000, 1_000),
        ("900mb", 9 * 10**8),
        (0.5, 50),
        ("7", 7),
        (3e9, 3 * 10**9),
    ],
)
def test_budgets_are_read(peak: Any, bytes_: int) -> None:
    assert MemoryBudget(peak).bytes(100) == bytes_


def test_what_cannot_fit_is_refused_with_the_smallest_peak() -> None:
    _, step = _step()
    with pytest.raises(BudgetError, match=rf"buffers, arguments.*\({step.smallest_peak_bytes} bytes\)") as alone:
        step.plan(step.resident_bytes)
    with pytest.raises(BudgetError, match=r"smallest peak is .* Allow that much") as refused:
        step.plan(step.smallest_peak_bytes - 1)
    assert alone.value.smallest == refused.value.smallest == step.smallest_peak_bytes
    assert step.plan(step.smallest_peak_bytes).peak_bytes == step.smallest_peak_bytes


def test_only_training_steps_have_a_budget() -> None:
    model = Model(depth=2)
    with torch.no_grad(), pytest.raises(BudgetError, match="gradients are disabled"):
        partita.fit(model, (_X, _Y), peak=0.5, rates=RATES)
    with pytest.raises(BudgetError, match="no result of the model requires gradients"):
        partita.fit(model.requires_grad_(requires_grad=False), (_X, _Y), peak=0.5, rates=RATES)
    with pytest.raises(BudgetError, match="let the model return its loss"):
        partita.fit(nn.Linear(32, 8), (_X,), peak=0.5, rates=RATES)


def test_a_model_of_few_operators_is_cut_too() -> None:
    """Blocks of three operators are no repeats, and thirteen operators could be one segment, which frees nothing."""

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
            self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = torch.nn.functional.silu(norm(layer(x)))
            return x.mean()

    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(2, 8, 16, 16)
    step = step_memory(model, (x,), rates=RATES)
    assert len(step.chain.links) > 2
    assert step.smallest_peak_bytes < 0.7 * step.plain_peak_bytes
    expected = _train(model, model, (x,), {})[1]
    plan = step.plan(step.smallest_peak_bytes)
    peak, gradients = _train(plan.module(), model, (x,), {})
    assert peak == pytest.approx(plan.peak_bytes, rel=0.001)
    assert all(map(torch.equal, gradients, expected))


def test_a_model_that_repeats_nothing_is_cut_at_narrow_places() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [8, 12, 16, 24, 32, 40, 48, 56, 64]
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

        def forward(self, x: Tensor) -> Tensor:
            for at, layer in enumerate(self.layers):
                x = torch.tanh(layer(x)) * torch.sigmoid(layer(x) * (at + 1)).cos().sin()
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Pyramid(), torch.randn(512, 8)
    step = step_memory(model, (x,), rates=RATES)
    assert len(step.chain.links) > 1
    expected = _train(model, model, (x,), {})[1]
    plan = step.plan(0.7)
    peak, gradients = _train(plan.module(), model, (x,), {})
    assert peak <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.02)
    assert _same(gradients, expected)


# Models of the transformers library.

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_WORDS = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1}


def _gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=32, use_cache=False, **_WORDS)
    return transformers.GPT2LMHeadModel(config)


def _llama(transformers: Any) -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **_WORDS, **_SMALL)
    return transformers.LlamaForCausalLM(config)


def _bert(transformers: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, **_SMALL))


def _t5(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": 96, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(use_cache=False, decoder_start_token_id=0, **sizes)
    )


def _vit(transformers: Any) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL))


_MODELS = {"GPT-2": _gpt2, "Llama": _llama, "BERT": _bert, "T5": _t5, "ViT": _vit}


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(_MODELS, "GPT-2"))
def test_peaks_of_models_are_predicted(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = _MODELS[name](transformers).train()
    ids = torch.randint(96, (2, 32))
    kwargs = {"input_ids": ids, "labels": ids.clone()}
    if name == "ViT":
        kwargs = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    step = step_memory(model, (), kwargs, rates=RATES)
    plain, expected = _train(step.chain.program.module(), model, (), kwargs)
    assert step.plain_peak_bytes == pytest.approx(plain, rel=0.02)
    for peak in (0.85, step.smallest_peak_bytes):
        plan = step.plan(peak)
        found, gradients = _train(plan.module(), model, (), kwargs)
        assert found <= plan.budget_bytes
        assert plan.peak_bytes == pytest.approx(found, rel=0.02)
        assert _same(gradients, expected)


def test_a_budget_curve_has_plans() -> None:
    curve = budget_curve(Model(depth=2), (_X, _Y), rates=RATES, points=2)
    assert len(curve) == 2


def test_rates_are_measured_whatever_mode_is_active() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = measure_rates(torch.device("cpu"), torch.float64)
    assert found.matmul_flops > found.bytes / 100 > 0
    assert found is measure_rates(torch.device("cpu"), torch.float64)
    with pytest.raises(OptionError, match="matmul_flops"):
        Rates(matmul_flops=-1, attention_flops=1e9, bytes=1e9)


def test_an_argument_that_is_a_view_is_taken() -> None:
    model, _ = _step()
    view = _X.flatten()[: 128 * 32].view(128, 32)
    fitted = partita.fit(model, (view, _Y[:128]), peak="1GB", rates=RATES)
    losses = []
    for module in (fitted, model):
        torch.manual_seed(1)  # For dropout.
        losses.append(module(_X[128:], _Y[128:]))
    assert torch.equal(*losses)
