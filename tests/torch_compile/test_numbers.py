"""Floats that change from call to call: they are inputs of Dynamo's graph, and no compiler makes constants of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita.memory import Rates
from partita.policies import AroundOperators, BySize
from partita.torch_compile import backend
from partita.treatments import Recompute

RATES = Rates(matmul_flops=1e11, attention_flops=1e11, bytes=1e10, call=5e-6)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


def _waves(x: Tensor, scale: float) -> Any:
    """Two regions read the float, and the graph returns what Python computes of it."""
    return torch.sin(torch.cos(x) * scale) * scale, scale * 2, (x.shape[0] * scale, x + 1), math.sqrt(scale)


def _assert_like_eager(function: Callable[..., Any], compiled: Callable[..., Any], x: Tensor) -> None:
    for scale in (1.0, 2.0, 3.0, 4.5, 2.0):
        torch.testing.assert_close(compiled(x, scale), function(x, scale))


@pytest.mark.parametrize("policy", [BySize(parts=1), BySize(parts=3), AroundOperators("sin")])
def test_no_piece_takes_or_returns_a_float(policy: Any) -> None:
    pieces: list[GraphModule] = []

    def inner(piece: GraphModule, _: Any) -> Callable[..., Any]:
        pieces.append(piece)
        return piece.forward

    _assert_like_eager(
        _waves, torch.compile(_waves, backend=backend, options={"policy": policy, "inner": inner}), torch.randn(4)
    )
    values = [
        node.meta["example_value"]
        for piece in pieces
        for node in (*piece.graph.find_nodes(op="placeholder"), *piece.graph.output_node().all_input_nodes)
    ]
    assert values
    assert not [value for value in values if isinstance(value, torch.SymFloat)]


@pytest.mark.parametrize(
    "options", [{"policy": BySize(parts=2)}, {"policy": BySize(parts=2), "treatment": Recompute()}]
)
def test_inductor_computes_with_the_float_of_each_call(options: dict[str, Any]) -> None:
    _assert_like_eager(_waves, torch.compile(_waves, backend=backend, options=options), torch.randn(4))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, float]:
        return (self.layer(x) * scale).sum(), scale * 2


def test_a_step_that_is_compiled_to_fit_returns_numbers() -> None:
    model = _Scaled()
    options = {"peak": "1GB", "rates": RATES, "inner": "aot_eager"}
    _assert_like_eager(model, torch.compile(model, backend=backend, options=options), torch.randn(4))


def _selected(x: Tensor, scale: float) -> Tensor:
    return torch.where(torch.sin(x) > scale / 10, x, scale)


def _blended(x: Tensor, scale: float) -> Tensor:
    return torch.sin(x).mul_(scale).add_(x, alpha=1 - scale)


@pytest.mark.parametrize("function", [_selected, _blended])
def test_a_float_that_inductor_would_make_a_constant_of_is_compiled_for_again(function: Callable[..., Any]) -> None:
    options = {"policy": BySize(parts=1)}
    _assert_like_eager(function, torch.compile(function, backend=backend, options=options), torch.randn(4))


def test_a_tensor_of_the_caller_is_no_number() -> None:
    """A graph that reads the number of a tensor and the tensor itself has no float argument."""

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return torch.sin(x) * scale.item() + scale

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, backend=backend, options={"policy": BySize(parts=2), "inner": "aot_eager"})
        for scale in (1.0, 2.0, 3.0):
            x = torch.randn(4)
            torch.testing.assert_close(compiled(x, torch.tensor(scale)), function(x, torch.tensor(scale)))


def _scaled_first(x: Tensor, scale: float) -> Tensor:
    """Only the first operators read the float."""
    return torch.cos(torch.sin(x * scale))


@pytest.mark.parametrize("function", [_waves, _scaled_first])
@pytest.mark.parametrize("policy", [BySize(operators=1), BySize(parts=2)])
def test_regions_that_do_not_read_a_float_are_not_compiled_for_each_of_its_values(
    function: Callable[..., Any], policy: Any
) -> None:
    frames: list[Any] = []
    options = {"policy": policy, "inner": "aot_eager", "on_plan": frames.append}
    compiled = torch.compile(function, backend=backend, options=options)
    for scale in (1.5, 2.0, -0.0, 0.0, 3.0, 4.5):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x, abs(scale)), function(x, abs(scale)))
    assert len(frames) == 2 if function is _scaled_first else len(frames) < 6


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_float_of_either_sign_of_zero_is_read_by_each_region(inner: str) -> None:
    compiled = torch.compile(
        _scaled_first, backend=backend, options={"policy": BySize(operators=1), "inner": inner}, dynamic=True
    )
    for scale in (1.5, -0.0, 0.0, -0.0, 2.5):
        x = torch.ones(4)
        found, expected = compiled(x, scale), _scaled_first(x, scale)
        torch.testing.assert_close(found, expected)
        assert torch.equal(torch.signbit(compiled(x, scale).acos()), torch.signbit(expected.acos()))


def _rows(x: Tensor, part: float) -> tuple[Tensor, Tensor, int]:
    """Sizes, and a number that is returned, follow from the float."""
    count = int(part)
    return torch.cos(torch.sin(x)[:count] + 1) * part, x.new_zeros(count + 1), count


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
@pytest.mark.parametrize("policy", [BySize(operators=1), BySize(parts=2)])
def test_sizes_that_follow_from_a_float_are_compiled_for_its_values(policy: Any, inner: str) -> None:
    compiled = torch.compile(_rows, backend=backend, options={"policy": policy, "inner": inner})
    for part in (1.5, 2.5, 3.25, 1.5):
        x = torch.randn(6)
        torch.testing.assert_close(compiled(x, part), _rows(x, part))
