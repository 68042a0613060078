"""Backwards of compiled regions that autograd records: right where they are used once, and a typed error where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.errors import BackendError
from partita.policies import BySize
from partita.treatments import Lower, Recompute, Treatment


class Net(nn.Module):
    """Its gradients come back transposed, which is not how compiled code expects them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight).tanh().t() @ self.weight).sin()


class Fixed(nn.Module):
    """Linear in its input, so that only what reaches its backward has a history."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("factor", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).t() + self.factor


class GradientInside(nn.Module):
    """Computes with the gradient of its own result, differentiable or not."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.detached, self.weight = detached, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return ((gradient.detach() if self.detached else gradient) ** 2).sum() + y


def applied(model: nn.Module, treatment: Treatment) -> Callable[..., Any]:
    program = partita.Program.of(torch.fx.symbolic_trace(model))
    return partita.plan(program, BySize(parts=2), treatment).apply().module()


def in_pieces(model: nn.Module, treatment: Treatment) -> Callable[..., Any]:
    options = {"policy": BySize(parts=2), "treatment": treatment, "inner": "aot_eager"}
    return torch.compile(model, backend="partita", options=options)


def whole(model: nn.Module, treatment: Treatment | None = None) -> Callable[..., Any]:
    return torch.compile(model, backend="partita", options={"inner": "aot_eager"})


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "applied": lambda model: applied(model, Lower("aot_eager")),
    "in pieces": lambda model: in_pieces(model, Lower("aot_eager")),
    "recomputed": lambda model: in_pieces(model, Recompute()),
    "whole": whole,
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recorded(call: Callable[..., Any], model: nn.Module) -> tuple[Tensor, ...]:
    """The gradients of a first backward that is recorded, with one of another layout, and of a plain one after it."""
    x = torch.arange(16.0).reshape(4, 4).div(8).requires_grad_()
    model.zero_grad()
    result = call(x)
    (first,) = torch.autograd.grad((result.t().cumsum(1) * x).sum(), x, create_graph=True)
    assert first.requires_grad
    (result.sum() + first.detach().sum()).backward()
    gradients = [tensor.grad for tensor in (x, *model.parameters())]
    return result.detach(), first.detach(), *(gradient for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("kind", [Net, Fixed])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_is_recorded_computes_as_in_eager_mode(way: str, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    expected, call = recorded(model, model), WAYS[way](model)
    for _ in range(3):
        for one, other in zip(recorded(call, model), expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", [Net, Fixed])
@pytest.mark.parametrize("way", WAYS)
def test_its_backward_is_refused_with_a_way_out(way: str, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    call = WAYS[way](model)
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        (first,) = torch.autograd.grad((call(x) * x.sin()).sum(), x, create_graph=True)
        with pytest.raises(BackendError, match=r"no double backward.*Lower\('eager'\)"):
            (first**2).sum().backward()


def test_the_ways_out_work() -> None:
    model = Net()

    def second(call: Callable[..., Any]) -> Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        (first,) = torch.autograd.grad((call(x) * x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad((first**2).sum(), x)
        return found

    for call in (applied(model, Lower("eager")), applied(model, Recompute()), in_pieces(model, Lower("eager"))):
        torch.testing.assert_close(second(call), second(model))


@pytest.mark.parametrize("way", ["in pieces", "recomputed", "whole"])
def test_a_model_that_computes_with_its_own_gradient_is_right_or_refused(way: str) -> None:
    x = torch.ones(4, 4)

    def gradient(model: nn.Module, call: Callable[..., Any]) -> Any:
        model.zero_grad()
        call(x.clone().requires_grad_()).backward()
        return model.get_parameter("weight").grad

    model = GradientInside(detached=True)
    torch.testing.assert_close(gradient(model, WAYS[way](model)), gradient(model, model))
    twice = GradientInside(detached=False)
    with pytest.raises(BackendError, match="trace_autograd_ops"):
        gradient(twice, WAYS[way](twice))


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch cannot trace them")
@pytest.mark.parametrize("way", ["in pieces", "recomputed", "whole"])
def test_a_gradient_in_the_graph_is_compiled(way: str) -> None:
    model, x = GradientInside(detached=False), torch.ones(4, 4)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = WAYS[way](model)(x.clone().requires_grad_())
    torch.testing.assert_close(found, model(x.clone().requires_grad_()))
