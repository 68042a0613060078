"""Writes in and around checkpoints: done once, undone for the second run, or refused with a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import assert_bitwise, every_operator, square, step
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import partita
from partita import recompute
from partita.errors import RecomputeError

_checkpoint = recompute.wrap_activation_checkpoint


class Normed(nn.Module):
    """A batch norm between products, with a dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + place, parameter.numel()).reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.first(x)).sin()) @ self.first.weight


def _captured(model: nn.Module) -> nn.Module:
    return partita.capture(model, (square().detach(),)).module()


@every_operator
@pytest.mark.parametrize("make", [_captured, symbolic_trace], ids=["captured", "traced"])
def test_a_batch_norm_in_training_writes_its_buffers_once(operator: Any, make: Callable[..., nn.Module]) -> None:
    def train(call: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, x = make(Normed()), square()
        found = [value for _ in range(3) for value in step(call, [x, *model.parameters()], model, x)]
        return [*found, *model.buffers()]

    found = train(operator)
    assert_bitwise(found, train(lambda body, x: body(x)))
    assert 3 in [value.item() for value in found if value is not None and value.numel() == 1]


@every_operator
def test_a_module_that_writes_its_buffers_is_refused(operator: Any) -> None:
    with pytest.raises(RecomputeError, match=r"the body mutates 'running_mean'|'num_batches_tracked'"):
        operator(nn.BatchNorm1d(4), square())
    with pytest.raises(RecomputeError, match=r"the body mutates '0\.running_mean', '0\.running_var'"):
        operator(nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True)), square())
    assert operator(nn.BatchNorm1d(4).eval(), square()).requires_grad


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x.sin() * 2


def _closing() -> Callable[[Tensor], Tensor]:
    counter = torch.zeros(())

    def body(x: Tensor) -> Tensor:
        counter.add_(1)
        return x.sin()

    return body


FUNCTIONS = {
    "operand": (lambda x: x.mul_(2).sin(), "'argument 0'"),
    "view of the operand": (lambda x: x.t()[0].mul_(2).sin(), "'argument 0'"),
    "state of its module": (Counting().forward, "'self.seen'"),
    "what it closes over": (_closing(), "'counter'"),
    "what it is bound to": (partial(lambda counter, x: (counter.add_(1), x.sin()), torch.zeros(())), "'argument 0'"),
}


@pytest.mark.parametrize(("body", "name"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_that_write_are_refused_with_a_name(body: Any, name: str) -> None:
    with pytest.raises(RecomputeError, match=f"the body mutates {name}, and recomputing it would do so again"):
        _checkpoint(body, square() * 1)


def test_functions_that_write_to_keywords_and_containers_are_refused_with_a_name() -> None:
    with pytest.raises(RecomputeError, match="'argument given'"):
        _checkpoint(lambda *, given: given.mul_(2).sin(), given=square() * 1)
    with pytest.raises(RecomputeError, match="'argument 0, item 1'"):
        _checkpoint(lambda pair: pair["b"].mul_(2).sin(), {"a": square() * 1, "b": square() * 1})


def test_without_gradients_functions_may_write() -> None:
    counting = Counting()
    with torch.no_grad():
        _checkpoint(counting, square())
    assert counting.seen == 1


WRITING = {
    "operand": lambda x, y: torch.sin(x.mul_(2)) * y,
    "twice": lambda x, y: torch.sin(x.mul_(2).add_(1)) * x * y,
    "through a view": lambda x, y: torch.sin(x.t()[1:].mul_(2)).sum() * x * y,
    "the other operand": lambda x, y: x.sin() * y.copy_(x).exp(),
    "own result": lambda x, y: torch.sin(x.mul(3).add_(1)) * y,
    "unread": lambda x, y: (torch.sin(x) + y, y.zero_())[0],
}


@every_operator
@pytest.mark.parametrize("body", WRITING.values(), ids=WRITING)
def test_graphs_may_write_to_what_they_are_given(operator: Any, body: Callable[..., Tensor]) -> None:
    graph = symbolic_trace(body)
    leaf = square()

    def run(call: Any) -> list[Any]:
        given = [leaf * 1, torch.ones(4, 4)]
        found = step(call, [leaf], graph, *given)
        return [*found, *given, *(value._version for value in given)]

    found, expected = run(operator), run(lambda body, *args: body(*args))
    assert_bitwise(found[:-2], expected[:-2])
    assert found[-2:] == expected[-2:]


def test_graphs_may_write_to_operands_that_are_views_of_one_another() -> None:
    graph, leaf = symbolic_trace(lambda a, b, c: torch.sin(a.mul_(2)) * b.exp().sum() + c), square()

    def run(call: Any) -> list[Tensor | None]:
        base = leaf * 1
        return [*step(call, [leaf], graph, base[0], base[:, 1], base), base]

    assert_bitwise(run(_checkpoint), run(lambda body, *args: body(*args)))


def test_a_write_that_the_backward_forbids_is_refused_with_the_nodes_that_write() -> None:
    graph = symbolic_trace(lambda x: torch.exp(x).add_(1).sin())
    with pytest.raises(RecomputeError, match=r"one of the nodes .*add_.* mutates a tensor that the backward needs"):
        _checkpoint(graph, square()).sum().backward()
    with pytest.raises(RecomputeError, match="the body mutates a tensor that the backward needs"):
        _checkpoint(lambda x: torch.exp(x).add_(1).sin(), square()).sum().backward()


# Between forward and backward ---------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("body", [lambda x: x.sin().exp(), symbolic_trace(lambda x: torch.sin(x).exp())])
def test_an_operand_that_changes_before_the_backward_is_named(operator: Any, body: Any) -> None:
    for given in (square() * 1, torch.ones(4, 4)):
        y = operator(body, given) * square()
        with torch.no_grad():
            given.add_(1)
        if y.grad_fn is not None and given.requires_grad:
            with pytest.raises(RecomputeError, match="'argument 0' was mutated between the region and its back"):
                y.sum().backward()


def test_keywords_and_items_that_change_before_the_backward_are_named() -> None:
    for call, name in (
        (lambda given: _checkpoint(lambda *, a: a.sin().exp(), a=given), "'argument a'"),
        (lambda given: _checkpoint(lambda a: a[1].sin().exp(), (2, given)), "'argument 0, item 1'"),
    ):
        given = square() * 1
        y = call(given)
        with torch.no_grad():
            given.add_(1)
        with pytest.raises(RecomputeError, match=f"{name} was mutated"):
            y.sum().backward()


def _linear_in_a_closure(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x).sin().exp()


HOLDERS: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "module": (lambda linear: nn.Sequential(linear, nn.Tanh()), "'0.weight'"),
    "traced": (lambda linear: symbolic_trace(nn.Sequential(linear, nn.Tanh())), "'0.weight'"),
    "method": (lambda linear: linear.forward, "'self.weight'"),
    "closure": (_linear_in_a_closure, "'linear.weight'"),
    "partial": (lambda linear: partial(torch.nn.functional.linear, weight=linear.weight), "'weight'"),
}


@every_operator
@pytest.mark.parametrize(("make", "name"), HOLDERS.values(), ids=HOLDERS)
def test_a_weight_that_changes_before_the_backward_is_named(operator: Any, make: Any, name: str) -> None:
    linear = nn.Linear(4, 4)
    y = operator(make(linear), square()).sin()
    with torch.no_grad():
        linear.weight.mul_(0.5)
    with pytest.raises(RecomputeError, match=f"{name} was mutated between forward and backward"):
        y.sum().backward()


def test_weights_that_the_region_does_not_read_may_change() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

        def part(self, x: Tensor) -> Tensor:
            return self.one(x).sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(_checkpoint(self.part, x))

    model, x = Two(), square()
    y = model(x)
    with torch.no_grad():
        model.other.weight.zero_()
    y.sum().backward()
    assert model.one.weight.grad is not None


def test_an_operand_may_change_where_somebody_else_has_saved_it() -> None:
    leaf = square()
    (expected,) = torch.autograd.grad((leaf * 1).sin().exp().sum(), leaf)
    given = leaf * 1
    with torch.autograd.graph.save_on_cpu():
        y = _checkpoint(lambda x: x.sin().exp(), given)
    assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], expected)


def test_training_goes_on_from_step_to_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = GraphModule(model, symbolic_trace(model).graph)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = _checkpoint(twin, _checkpoint(model, square())).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


# Inference tensors --------------------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("make", [symbolic_trace, lambda body: body], ids=["graph", "function"])
def test_inference_tensors_may_be_operands(operator: Any, make: Any) -> None:
    with torch.inference_mode():
        scale = torch.full((4, 4), 2.0)
    body, x = make(lambda a, b: torch.sin(a) + torch.cos(b)), square()
    assert_bitwise(step(operator, [x], body, x, scale), step(body, [x], x, scale))
    assert scale.is_inference()


def test_functions_that_are_given_inference_tensors_may_not_write_either() -> None:
    with torch.inference_mode():
        scale = torch.full((4, 4), 2.0)
    with pytest.raises(RecomputeError, match="the body mutates 'argument 0'"):
        _checkpoint(lambda a, b: torch.sin(a.mul_(2)) + torch.cos(b), square() * 1, scale)
