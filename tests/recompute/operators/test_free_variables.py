"""Checkpoints by hand: what a function, a method, a partial or a module reaches is seen, or refused before it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import square
from torch import Tensor, nn
from torch.fx import symbolic_trace

import partita
from partita import recompute
from partita.errors import OptionError, RecomputeError
from partita.policies import BySize
from partita.treatments import Recompute

_checkpoint = recompute.wrap_activation_checkpoint


class Normed(nn.Module):
    """A norm in training, whose writes torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sin()


WHOLE: dict[str, Callable[[Normed], Any]] = {"module": lambda model: model, "partial of a module": partial}
REACHES: dict[str, Callable[[Normed], Any]] = {
    "method": lambda model: model.forward,
    "partial of a method": lambda model: partial(model.forward),
    "argument of a partial": lambda model: partial(lambda model, x: model(x), model),
    "closure": lambda model: lambda x: model(x),
}


@pytest.mark.parametrize("reach", WHOLE)
def test_a_norm_in_training_is_refused_before_it_writes(reach: str) -> None:
    model = Normed()
    with pytest.raises(RecomputeError, match=r"'norm.running_mean'"):
        _checkpoint(WHOLE[reach](model), square())
    assert not model.norm.running_mean.any()  # type: ignore[union-attr]


# A method, or a function with a model in reach, may use no norm of it, so that is only seen when it has happened.
@pytest.mark.parametrize("reach", REACHES)
def test_a_norm_in_reach_that_writes_is_an_error(reach: str) -> None:
    model = Normed()
    with pytest.raises(RecomputeError, match=r"norm.num_batches_tracked'"):
        _checkpoint(REACHES[reach](model), square())
    model.eval()
    x = square()
    runs = (model, partial(_checkpoint, REACHES[reach](model)))
    assert torch.equal(*(torch.autograd.grad(run(x).sum(), x)[0] for run in runs))


def test_so_is_a_norm_in_a_module_that_is_given() -> None:
    with pytest.raises(RecomputeError, match=r"'argument 0.norm.num_batches_tracked'"):
        _checkpoint(lambda model, x: model(x), Normed(), square())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.source)


def _times_noise(x: Tensor, source: Any) -> Tensor:
    return x * torch.rand((4, 4), generator=source)


def test_a_generator_of_its_own_is_refused_wherever_it_is() -> None:
    source, model = torch.Generator(), Noisy()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("argument 1", lambda: _checkpoint(_times_noise, square(), source)),
        ("argument 1", lambda: _checkpoint(symbolic_trace(_times_noise), square(), source)),
        ("source", lambda: _checkpoint(model, square())),
        ("source", lambda: _checkpoint(partial(_times_noise, source=source), square())),
        ("source", lambda: _checkpoint(lambda x: _times_noise(x, source), square())),
    ]
    for name, call in calls:
        before = source.get_state()
        with pytest.raises(RecomputeError, match=f"uses its own random number generator, '{name}'"):
            call()
        assert torch.equal(source.get_state(), before)


class Remembering(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return (x * x).sin()


def test_a_write_to_a_plain_attribute_is_seen() -> None:
    with pytest.raises(RecomputeError, match="the body mutates 'total'"):
        _checkpoint(Remembering(), square())


# RReLU saves its noise first, and draws it then.
@pytest.mark.parametrize("way", ["module", "captured", "traced"])
def test_what_is_saved_before_it_is_computed_is_computed_again(way: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.RReLU()), square()
    run: Callable[..., Any] = partial(_checkpoint, model)
    if way != "module":
        program = partita.capture(model, (x,)) if way == "captured" else symbolic_trace(model)
        run = partita.plan(program, BySize(parts=1), Recompute()).apply().module()

    def gradient(call: Callable[..., Any]) -> Tensor:
        torch.manual_seed(1)
        return torch.autograd.grad(call(x).square().sum(), model[0].weight)[0]

    junk = [torch.full((4, 4), 1e30) for _ in range(64)]
    del junk  # What nobody has computed is likely to be this.
    assert torch.equal(gradient(run), gradient(model))


@pytest.mark.parametrize("way", ["module", "traced"])
def test_a_module_that_is_set_to_evaluation_before_the_backward_is_recomputed_in_training(way: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), square()
    run: Any = partial(_checkpoint, model)
    if way == "traced":
        run = partita.plan(symbolic_trace(model), BySize(parts=1), Recompute()).apply().module()

    def gradient(call: Any, *, switches: bool) -> Tensor:
        owner = call if isinstance(call, nn.Module) else model
        owner.train()
        torch.manual_seed(0)
        loss = call(x).sum()
        owner.train(not switches)
        found = torch.autograd.grad(loss, x)[0]
        assert owner.training is not switches
        return found

    assert torch.equal(gradient(run, switches=True), gradient(model, switches=False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_fn": 3}, "context_fn is a function that returns the contexts .*, not 3"),
        ({"context_fn": lambda: 3}, "context_fn returns two contexts, .*, not 'int'"),
        ({"determinism_check": "some"}, "determinism_check is 'default' or 'none', not 'some'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        _checkpoint(torch.sin, square(), **options)


def _halved(x: Tensor) -> Tensor:
    hidden = (x * x).unsqueeze(0)[0]
    torch._foreach_mul_([hidden], 0.5)
    return hidden


def test_a_foreach_that_would_lose_its_gradient_is_refused() -> None:
    x = square()
    with pytest.raises(RecomputeError, match=r"_foreach_mul_\.Scalar mutates a view in a kept segment"):
        _checkpoint(lambda x: recompute.keep(_halved, x), x)
    assert torch.equal(*(torch.autograd.grad(run(x).sum(), x)[0] for run in (_halved, partial(_checkpoint, _halved))))
