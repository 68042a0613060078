"""Gradients of lowered regions that write: who gets one, and what the backward finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, plan_of
from torch import Tensor, nn
from torch.fx import Graph, symbolic_trace

from partita import Program, capture, plan, verify
from partita.policies import ByCapability, ByLabel, ByMode, BySize
from partita.treatments import Call, Lower, Mode, Recompute


def test_a_mutation_of_one_input_gives_no_gradient_to_another() -> None:
    def write(x: Tensor, y: Tensor) -> None:
        x.sin_()
        y.fill_(0.25)

    module = plan_of(write, Lower(Counting())).apply().module()
    leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
    x, y = (leaf * 1 for leaf in leaves)
    module(x, y)
    gradients = torch.autograd.grad(y.sum(), leaves, retain_graph=True, allow_unused=True)
    assert gradients[0] is None
    assert torch.equal(gradients[1], torch.zeros(3))
    (again,) = torch.autograd.grad((x + y).sum(), leaves[:1])
    assert torch.equal(again, leaves[0].cos())


def test_two_results_of_one_region_get_their_own_gradients_in_the_next() -> None:
    """Both have the history of one compiled function, and only one of them is used."""

    def first(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y.cos()

    def second(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.exp(), b.tanh()

    one, other = (plan_of(function, Lower(Counting())).apply().module() for function in (first, second))
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    _, used = other(*one(x, y))
    gradients = torch.autograd.grad(used.sum(), (x, y), allow_unused=True)
    assert gradients[0] is None
    assert gradients[1] is not None


def test_a_view_that_autograd_does_not_track_is_mutated_without_gradients() -> None:
    """Made without gradients and mutated by a value with gradients: with gradients, it may not be used again."""
    module = plan_of(lambda x: x.mul_(2), Lower(Counting(), strict=True)).apply().module()
    x = torch.ones(2, 3, requires_grad=True) * 1
    with torch.no_grad():
        view = x.t()
    x.add_(1)
    with torch.no_grad():
        module(view)
        module(view)
    assert torch.equal(x, torch.full((2, 3), 8.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_input_that_is_mutated_and_needed_by_the_backward_is_kept_as_it_was(backend: str) -> None:
    """torch.compile (2.13) raises in the backward."""

    def write(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return y + 1

    module = plan_of(write, Lower(backend, strict=True)).apply().module()
    leaves = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    x, y = (leaf * 1 for leaf in leaves)
    result = module(x, y)
    found = torch.autograd.grad((result + x).sum(), leaves)
    torch.testing.assert_close(found, (leaves[1].detach(), leaves[0].detach() + 1))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_gradients_whose_conjugation_is_a_bit_flow_into_lowered_regions(parts: int) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            f = torch.fft.fft(x)
            return torch.view_as_complex(torch.view_as_real(f) * 2).conj() * 2, f.real

    x = torch.randn(3, 4, requires_grad=True)

    def gradient(function: Callable[..., Any]) -> Tensor:
        spectrum, real = function(x)
        loss = torch.view_as_real(spectrum.resolve_conj()).square().sum() + real.sum()
        return torch.autograd.grad(loss, x)[0]

    lowered = plan(capture(Spectrum(), (x,)), BySize(parts=parts), Lower("aot_eager")).apply().module()
    torch.testing.assert_close(gradient(lowered), gradient(Spectrum()))


class ViewOfInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            frozen = x.view(-1)
        return x * 2, frozen


class ViewOfResult(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 3
        with torch.no_grad():
            frozen = h.t()
        return h, frozen, frozen[0]


class ViewAlone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 3
        with torch.no_grad():
            frozen = h.t()
        return (frozen,)


class ViewThatIsUsed(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            first, second = x.unbind(0)
        return first, x * second, x.view(-1)


CUTS = [(ByMode(), Mode()), (BySize(parts=1), Recompute()), (BySize(parts=1), Call())]


@pytest.mark.parametrize("model", [ViewOfInput, ViewOfResult, ViewAlone, ViewThatIsUsed])
@pytest.mark.parametrize("cut", CUTS, ids=["mode", "recompute", "call"])
def test_no_gradient_flows_through_a_view_that_a_body_inside_makes_under_no_grad(
    model: type[nn.Module], cut: tuple[Any, Any]
) -> None:
    """AOTAutograd (torch 2.13) makes such a view anew, with gradients; torch.compile does the same."""

    def told(function: Callable[..., Any]) -> list[tuple[bool, bool, bool, Any]]:
        x = torch.ones(2, 2, requires_grad=True)
        found = []
        for result in function(x):
            (gradient,) = torch.autograd.grad(result.sum(), x, retain_graph=True, allow_unused=True)
            known = None if gradient is None else gradient.tolist()
            found.append((result.requires_grad, result.is_leaf, result._is_view(), known))
        return found

    nested = plan(capture(model(), (torch.ones(2, 2, requires_grad=True),)), *cut).apply()
    lowering = plan(nested, ByCapability("aot_eager"), Lower("aot_eager", strict=True))
    assert told(lowering.apply().module()) == told(model())


def test_a_view_that_a_module_makes_under_no_grad_passes_no_gradient_on() -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return x.view(-1)

    graph, root = Graph(), nn.Module()
    root.leaf = Leaf()
    x_node = graph.placeholder("x")
    graph.output((graph.call_method("mul", (x_node, 2)), graph.call_module("leaf", (x_node,))))
    module = plan_of(program_of(graph, root), Lower(Counting(), strict=True)).apply().module()
    x = torch.ones(2, 2, requires_grad=True)
    result, frozen = module(x)
    (result.sum() + frozen.sum()).backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize(
    "mutates",
    [
        lambda x, w: x.detach().add_(w),
        lambda x, w: x.detach()[:2].mul_(w[:2]),
        lambda x, w: x.data.add_(w).view(-1),
        lambda x, w: x.detach().add_(x * w),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_detached_input_that_is_mutated_by_what_has_gradients_gets_them(mutates: Any, grad: bool) -> None:
    program = Program.of(torch.fx.symbolic_trace(mutates))
    planned = plan(program, ByLabel(lambda _: "all"), Lower("aot_eager"))
    w = torch.linspace(-1, 1, 4).requires_grad_(grad)
    verify(program, planned.apply(), (torch.ones(4), w))
    assert ["detached input" in failure.reason for failure in planned.failures] == [True] * grad


def test_a_mutated_view_that_no_output_needs_gets_no_gradient() -> None:
    """The region mutates two views; only one of them reaches the loss."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        unused, used = (x * w).view(-1), x.neg().view(-1)
        unused.mul_(2)
        return used.mul_(0.5)

    program = Program.of(symbolic_trace(function))
    inside = {node.name for node in program.operators() if str(node.target) == "mul_"}
    policy = ByLabel(lambda node: "region" if node.name in inside else None)
    module = plan(program, policy, Lower("aot_eager", strict=True)).apply().module()
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    for _ in range(2):
        x.grad = w.grad = None
        module(x, w).sum().backward()
        assert w.grad is None
        assert torch.equal(x.grad, torch.full((2, 3), -0.5))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x).sin(), self.unused(x).cos()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_unused_parameters_never_get_none(register: str) -> None:
    model, x, seen = _TwoHeads(), torch.randn(2, 4), list[Tensor]()

    def hook(value: Tensor) -> None:
        gradient = value if register == "register_hook" else value.grad
        assert gradient is not None
        seen.append(gradient * 0.5)

    getattr(model.unused.weight, register)(hook)
    lowered = plan(capture(model, (x,)), BySize(parts=1), Lower("aot_eager")).apply().module()
    lowered(x)[0].sum().backward()
    assert all(not one.any() for one in seen)
    assert model.unused.bias.grad is None


def test_an_unused_complex_result_between_regions_has_no_gradient() -> None:
    def between(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.fft.fft(x * 2)
        return x.sin() * 3, z.abs() + 1

    x = torch.randn(6, requires_grad=True)
    program = capture(between, (x,))
    names = [node.name for node in program.operators()]
    halves = ByLabel(lambda node: names.index(node.name) < names.index("abs_1"))
    lowered = plan(program, halves, Lower("aot_eager")).apply().module()
    lowered(x)[0].sum().backward()
    assert x.grad is not None
