"""A step through compiled pieces: one Python call a piece where nothing else has to be done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch_compile.helpers import compiled
from torch import Tensor, nn

from partita.torch_compile._torch.direct_calls import behind_wrappers


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.register_buffer("calls", torch.zeros(6))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls.add_(1)
        x = torch.tanh(x * self.scale + self.shift)
        return torch.sigmoid(x * x - self.shift) + x + self.calls


class _Model(nn.Module):
    def __init__(self, count: int, *, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer() for _ in range(count))
        for layer in self.layers:
            layer.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def python_calls(function: Callable[..., Any], *args: Any) -> int:
    """How many Python functions a call of `function` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return count


@torch.no_grad()
def _steady_calls(model: nn.Module, x: Tensor) -> int:
    call, expected = compiled(model), model(x)
    for _ in range(3):
        torch.testing.assert_close(call(x), expected)
    return python_calls(call, x)


def test_a_layer_more_is_one_python_call_more() -> None:
    x = torch.randn(4, 6)
    assert _steady_calls(_Model(6), x) - _steady_calls(_Model(3), x) == 3


@torch.no_grad()
def test_layers_that_mutate_buffers_do_so_at_every_call() -> None:
    model, twin, x = _Model(3, counts=True), _Model(3, counts=True), torch.randn(4, 6)
    call = compiled(model)
    versions = [layer.calls._version for layer in model.layers]
    for _ in range(3):
        torch.testing.assert_close(call(x), twin(x))
    for layer, other, version in zip(model.layers, twin.layers, versions, strict=True):
        assert torch.equal(layer.calls, other.calls)
        assert layer.calls._version > version


def test_other_modes_of_the_caller_are_respected_after_direct_calls() -> None:
    model, x = _Model(3), torch.randn(4, 6)
    call = compiled(model)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(call(x), model(x))
        trained = call(x)
        assert trained.requires_grad
        gradients = torch.autograd.grad(trained.sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, expected)


@torch.no_grad()
def test_layers_with_dynamic_sizes_are_called_directly_too() -> None:
    model = _Model(3)
    call = compiled(model, dynamic=True)
    for size in (4, 5, 7, 4):
        x = torch.randn(size, 6)
        torch.testing.assert_close(call(x), model(x))


def test_a_function_with_wrappers_that_are_not_known_is_called_as_it_is() -> None:
    assert behind_wrappers(lambda *args: args, output_count=1) is None
