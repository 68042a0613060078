"""Regions that train one after the other: one autograd node where a backward that reaches one of them reaches all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch_compile.helpers import compiled
from tests.torch_compile.test_direct_training import Model, Trained
from torch import Tensor, nn

from partita.torch_compile import trained_runs


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


def nodes_of_regions(*values: Tensor) -> int:
    """How many autograd functions of compiled code a backward from these values would reach."""
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn for value in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return sum(node.name() == "CompiledFunctionBackward" for node in seen)


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The gradients of the third step, and of the input."""
    for _ in range(3):
        model.zero_grad()
        x = x.detach().requires_grad_()
        found = call(x)
        sum(value.square().mean() for value in (found if isinstance(found, tuple) else (found,))).backward()
    return [*(parameter.grad for parameter in model.parameters()), x.grad]


def assert_same_bits_with_a_node_for_each(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    found = gradients(compiled(model), model, x)
    torch.compiler.reset()
    monkeypatch.setattr(trained_runs, "_LONGEST", 1)
    expected = gradients(compiled(twin), twin, x)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))


def test_layers_of_a_chain_are_one_node() -> None:
    trained = Trained(Model(6))
    assert nodes_of_regions(trained.call(trained.x)) == 1
    trained.assert_alike()


def test_a_long_chain_is_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_runs, "_LONGEST", 2)
    trained = Trained(Model(5))
    assert nodes_of_regions(trained.call(trained.x)) == 3
    trained.assert_alike()


def test_layers_that_share_a_parameter_sum_its_gradients_as_autograd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(5)
    for layer in model.layers[1:]:
        layer.scale = model.layers[0].scale
    assert_same_bits_with_a_node_for_each(model, monkeypatch)


class _ReadsTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return torch.sigmoid(torch.tanh(x * self.scale) + torch.cos(first * self.scale)) * first + x


class _Skips(nn.Module):
    """Every layer reads the result of the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_ReadsTwo() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x, torch.ones_like(x))
        for layer in self.layers[1:]:
            x = layer(x, first)
        return x


def test_a_value_that_several_layers_read_gets_the_sum_of_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(_Skips())
    assert nodes_of_regions(trained.call(trained.x)) < 5
    trained.assert_alike()
    torch.compiler.reset()
    assert_same_bits_with_a_node_for_each(_Skips(), monkeypatch)


class _ReturnsTwo(Model):
    """The result of the third of six layers, and of the last."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:3]:
            x = layer(x)
        middle = x
        for layer in self.layers[3:]:
            x = layer(x)
        return middle, x


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_layers_after_a_returned_value_are_a_node_of_their_own(used: tuple[bool, bool]) -> None:
    model = _ReturnsTwo(6)
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    call, called = compiled(model), list[Tensor | None]()
    for one in (model, twin):
        one.layers[5].scale.register_hook(called.append)
    for _ in range(3):
        for one in (call, twin):
            results = one(x)
            sum(value.square().mean() for value, is_used in zip(results, used, strict=True) if is_used).backward()
    assert nodes_of_regions(*call(x)) == 2
    assert None not in called
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


class _TakesAPart(Model):
    """An operator that runs outside of regions, an index into a tensor, after the third layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        x = x[0]
        for layer in self.layers[3:]:
            x = layer(x)
        return x


def test_an_index_into_the_result_of_a_layer_is_no_result_of_a_layer() -> None:
    trained = Trained(_TakesAPart(6))
    assert nodes_of_regions(trained.call(trained.x)) >= 2
    trained.assert_alike()


def test_hooks_that_use_up_gradients_get_them_region_by_region() -> None:
    model = Model(4)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    call, x = compiled(model), torch.randn(4, 6)
    for _ in range(3):
        found = call(x)
        found.square().mean().backward()
    assert nodes_of_regions(found) == 4
    assert all(parameter.grad is None for parameter in model.parameters())


class _ReadsAfterwards(Model):
    """A parameter that all layers share, and an operator outside of regions that reads it after them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        for layer in self.layers[1:]:
            layer.scale = self.layers[0].scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x[0], self.layers[0].scale[:3].exp()


def test_a_shared_parameter_that_is_read_after_the_layers_keeps_the_order_of_its_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_same_bits_with_a_node_for_each(_ReadsAfterwards(5), monkeypatch)


def test_a_parameter_that_runs_share_keeps_the_order_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_runs, "_LONGEST", 4)
    model = Model(7)
    for layer in model.layers[1:]:
        layer.scale = model.layers[0].scale
    call, x = compiled(model), torch.randn(4, 6)
    gradients(call, model, x)
    # The last four, whose gradients come first.
    assert nodes_of_regions(call(x.requires_grad_())) == 4
    torch.compiler.reset()
    assert_same_bits_with_a_node_for_each(model, monkeypatch)


def test_hooks_on_saved_tensors_get_them_region_by_region() -> None:
    """So that what they move elsewhere is never all there at once."""
    trained, seen = Trained(Model(4)), list[str]()

    def unpack(value: Tensor) -> Tensor:
        seen.append("unpacked")
        return value

    for layer in trained.model.layers:
        layer.scale.register_hook(lambda _: seen.append("gradient"))
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        found = trained.call(trained.x)
    assert nodes_of_regions(found) == 4
    found.square().mean().backward()
    order = [one for at, one in enumerate(seen) if at == 0 or seen[at - 1] != one]
    assert order == ["unpacked", "gradient"] * 4
    trained.twin(trained.x).square().mean().backward()
    trained.assert_same_gradients()
    assert nodes_of_regions(trained.call(trained.x)) == 1
