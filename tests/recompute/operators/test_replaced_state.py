"""State that is put into the place of another between forward and backward, and inputs that are written later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import partita
from partita.errors import RecomputeError
from partita.policies import BySize
from partita.recompute import wrap_activation_checkpoint
from partita.treatments import Recompute

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sin(self.a(x))).sin()


def recomputed(model: nn.Module) -> nn.Module:
    traced = partita.Program.of(symbolic_trace(model))
    return partita.plan(traced, BySize(parts=1), Recompute()).apply().module()


def by_hand(model: nn.Module) -> Callable[..., Any]:
    return lambda x: wrap_activation_checkpoint(model, x)


def replace_weight(model: Two) -> None:
    model.a.weight = nn.Parameter(model.a.weight.detach() * 2)
    model.b.weight = nn.Parameter(model.b.weight.detach() * 2)


@pytest.mark.parametrize("way", [recomputed, by_hand])
def test_a_parameter_that_is_replaced_is_not_read_in_the_backward(way: Callable[[nn.Module], Any]) -> None:
    plain, other = Two(), Two()
    other.load_state_dict(plain.state_dict())
    inputs = []
    for model, run in ((plain, plain), (other, way(other))):
        x = X.clone().requires_grad_()
        loss = run(x).sum()
        replace_weight(model)
        loss.backward()
        inputs.append(x.grad)
    assert torch.equal(*inputs)


def test_a_functional_call_has_the_gradients_of_its_parameters() -> None:
    model = Two()
    other = recomputed(copy.deepcopy(model))
    given = {name: (parameter.detach() * 2).requires_grad_() for name, parameter in model.named_parameters()}
    again = {name: (parameter.detach() * 2).requires_grad_() for name, parameter in other.named_parameters()}
    torch.func.functional_call(model, given, (X,)).sum().backward()
    torch.func.functional_call(other, again, (X,)).sum().backward()
    pairs = [(given[name].grad, again[f"part_0.{name}"].grad) for name in given]
    assert all(torch.equal(*pair) for pair in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [recomputed, by_hand])
def test_other_data_under_a_parameter_is_an_error_that_names_it(way: Callable[[nn.Module], Any]) -> None:
    model = Two()
    loss = way(model)(X).sum()
    model.a.weight.data = model.a.weight.data * 2
    with pytest.raises(RecomputeError, match=r"a\.weight"):
        loss.backward()


def in_a_closure(model: nn.Module) -> Callable[..., Any]:
    return lambda x: wrap_activation_checkpoint(lambda given: model(given), x)


def as_arguments(model: Two) -> Callable[..., Any]:
    def body(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(nn.functional.linear(x, weight)).sin()

    return lambda x: wrap_activation_checkpoint(body, x, model.a.weight)


@pytest.mark.parametrize("way", [recomputed, by_hand, in_a_closure, as_arguments])
@pytest.mark.parametrize("wanted", [True, False])
def test_whether_a_parameter_wants_gradients_may_change_before_the_backward(way: Any, wanted: bool) -> None:
    model = Two().requires_grad_(wanted)
    expected = torch.autograd.grad(way(model)(x := X.clone().requires_grad_()).sum(), x)
    loss = way(model)(x).sum()
    model.requires_grad_(not wanted)
    assert torch.equal(*torch.autograd.grad(loss, x), *expected)
    assert all(parameter.requires_grad is not wanted for parameter in model.parameters())


def test_buffers_that_are_replaced_are_not_written_in_the_backward() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).train()
    clean = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = recomputed(model)
    loss = run(X).sin().sum()
    model[0].load_state_dict({name[2:]: clean[name] for name in clean if name.startswith("0.")}, assign=True)
    loss.backward()
    assert all(torch.equal(tensor, clean[f"0.{name}"]) for name, tensor in model[0].named_buffers())


class Writes(nn.Module):
    """Reads its input, and writes to it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.a(x.clone()))
        x.add_(1)
        return y.sin()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", ["eager", "compiled", "marked"])
def test_an_input_that_is_written_later_is_not_read_in_the_backward(way: str, parts: int) -> None:
    torch._dynamo.reset()
    plain, other = Writes(), Writes()
    other.load_state_dict(plain.state_dict())
    run: Callable[..., Any] = other
    if way == "marked":
        options = {"policy": BySize(parts=parts), "treatment": Recompute(), "inner": "aot_eager"}
        run = torch.compile(other, backend="partita", options=options)
    else:
        program = partita.capture(other, (X.clone(),))
        applied = partita.plan(program, BySize(parts=parts), Recompute()).apply().module()
        run = applied if way == "eager" else torch.compile(applied, backend="aot_eager")
    plain(X.clone()).sum().backward()
    run(X.clone()).sum().backward()
    assert torch.equal(plain.a.weight.grad, other.a.weight.grad)  # type: ignore[arg-type]


def test_a_region_inside_a_transform_is_refused() -> None:
    def batched(x: Tensor, weight: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.sin(row @ weight).sum())(x)

    def keep_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    graphs: list[torch.fx.GraphModule] = []
    torch.compile(batched, backend=keep_graph)(X, torch.randn(6, 6, requires_grad=True))
    with pytest.raises(RecomputeError, match=r"torch\.func transform"):
        partita.plan(partita.Program.of(graphs[0]), BySize(parts=2), Recompute()).apply()
