"""Random numbers in regions that are traced: eager's own, or the region runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.lowering.helpers import plan_of
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita import Program, capture, verify
from partita.backends import Inductor, inductor
from partita.backends._torch import support
from partita.errors import BackendError
from partita.treatments import Lower

_BACKENDS = ("aot_eager", "inductor")
_EAGER = ("aot_eager",)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.5, True),
    "bernoulli_": lambda x: (x * 1).bernoulli_(),
    "dropout_": lambda x: nn.functional.dropout(x * 1, 0.5, True, True),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: (x * 1).normal_(),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
}


def lowered(draw: Callable[[Tensor], Tensor] | nn.Module, x: Tensor, backend: str = "aot_eager") -> list[str]:
    """What could not be compiled of a program that means the same when it is lowered."""
    program = Program.of(torch.fx.symbolic_trace(draw))
    plan = plan_of(program, Lower(backend))
    verify(program, plan.apply(), (x,))
    return [failure.reason for failure in plan.failures]


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_into_a_contiguous_tensor_is_traced(name: str) -> None:
    assert not lowered(DRAWS[name], torch.randn(8, 12, requires_grad=True))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_into_a_transposed_tensor_runs_eagerly(name: str) -> None:
    (reason,) = set(lowered(DRAWS[name], torch.randn(12, 8).t().requires_grad_()))
    assert "not contiguous" in reason


def test_a_draw_into_a_tensor_with_gaps_runs_eagerly() -> None:
    assert lowered(lambda x: (x * 1)[:, ::2].normal_(), torch.randn(8, 12))


def test_a_dropout_of_a_transposed_tensor_is_traced() -> None:
    assert not lowered(lambda x: nn.functional.dropout(x, 0.5, True), torch.randn(12, 8).t().requires_grad_())


def test_the_backward_of_inductor_draws_nothing() -> None:
    """torch.compile generates random numbers again there, which are unused."""
    assert not lowered(lambda x: torch.bernoulli(x.sigmoid()), torch.randn(8, 12, requires_grad=True), "inductor")


def _sum(x: Tensor, w: Tensor) -> Tensor:
    y = x + nn.functional.dropout(x @ w, 0.3)
    return y.to(torch.float32) * 2


def _product(x: Tensor, w: Tensor) -> Tensor:
    y = x + nn.functional.dropout(x * w, 0.3)
    return y.to(torch.float32) + 1


def _noise(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.rand(4)
    y = x * noise.double().to(torch.float32)
    return y + w, torch.randn_like(y).to(torch.float64).to(torch.float32) * x


def _checked(x: Tensor, w: Tensor) -> Tensor:
    y = nn.functional.dropout(x * w, 0.3) + torch.rand(4)
    torch._assert_async((y < 1e9).all(), "too large")
    return y.sin() + w


@pytest.mark.parametrize(
    ("function", "backend"),
    slow_but(
        product((_sum, _product, _noise, _checked), _BACKENDS),
        *product((_sum, _product, _noise, _checked), _EAGER),
        (_checked, "inductor"),
    ),
)
def test_asserted_random_numbers_bring_no_random_operator_into_the_backward(
    function: Callable[..., Any], backend: str
) -> None:
    """torch.export writes a check of the dtype before every conversion."""
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    program = capture(function, (x, w))
    plan = plan_of(program, Lower(backend, strict=True))
    verify(program, plan.apply(), (x, w))
    assert any("assert" in node.name for region in plan.partition for node in region.nodes)


def test_the_backward_draws_nothing_where_inductor_keeps_draws_by_a_global_setting() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        assert not lowered(lambda x: x * x + torch.rand_like(x), torch.randn(8, 12, requires_grad=True))


@pytest.mark.parametrize("backend", slow_but(_BACKENDS, *_EAGER))
def test_a_check_still_raises_in_a_lowered_region(backend: str) -> None:
    x = torch.zeros(4, 4, requires_grad=True)
    plan = plan_of(capture(_checked, (x, x)), Lower(backend, strict=True))
    with pytest.raises(RuntimeError, match="too large"):
        plan.apply().module()(x + 1e9, x + 1e9)


@pytest.mark.parametrize("layer", [nn.GRU(4, 4, 2, dropout=0.5), nn.RNN(4, 4, 3, dropout=0.5, bidirectional=True)])
@pytest.mark.parametrize("backend", slow_but(_BACKENDS, *_EAGER))
def test_dropout_between_layers_is_kept(layer: nn.Module, backend: str) -> None:
    x = torch.randn(3, 2, 4)
    program = capture(layer, (x,))
    verify(program, plan_of(program, Lower(backend)).apply(), (x,))


def test_dropout_between_layers_that_begin_to_train_later_is_kept() -> None:
    x, layer = torch.randn(3, 2, 4), nn.GRU(4, 4, 2, dropout=0.5).eval()
    program = Program.of(torch.fx.symbolic_trace(nn.Sequential(layer)))
    plan = plan_of(program, Lower("aot_eager"))
    lowered = plan.apply().module()
    lowered(x)
    assert not plan.failures
    layer.train()
    lowered.train()
    results = []
    for run in (layer, lowered):
        torch.manual_seed(3)
        results.append(run(x)[0])
    assert torch.equal(*results)
    assert "would lose" in plan.failures[0].reason


ALL_DROPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: nn.functional.dropout(x, 1.0),
    "function with names": lambda x: nn.functional.dropout(input=x, p=1, training=True),
    "operator": lambda x: torch.ops.aten.dropout.default(x, 1.0, True),
    "in place": lambda x: nn.functional.dropout(x * 1, 1.0, True, True),
    "module": nn.Dropout(1.0),
    "channels": lambda x: nn.functional.dropout2d(x[None], 1.0),
    "infinite": lambda x: nn.functional.dropout(x / 0, 1.0),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(product(ALL_DROPPED, _BACKENDS), *product(ALL_DROPPED, _EAGER), ("function", "inductor")),
)
def test_nothing_is_drawn_to_drop_everything(name: str, backend: str) -> None:
    draw = ALL_DROPPED[name]
    wrapped = nn.Sequential(draw) if isinstance(draw, nn.Module) else draw
    assert not lowered(wrapped, torch.randn(2, 3, 4, requires_grad=True), backend)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_attention_that_drops_everything_runs_eagerly(backend: str) -> None:
    def attend(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=1.0)

    (reason,) = set(lowered(attend, torch.randn(2, 3, 4, requires_grad=True), backend))
    assert "drops everything" in reason


def _body(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"), *args)),))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("keeps_order", [False, True])
def test_inductor_keeps_the_order_of_random_operators(monkeypatch: pytest.MonkeyPatch, *, keeps_order: bool) -> None:
    given: list[frozenset[str]] = []

    def compiled(module: Any, inputs: Any, options: dict[str, object]) -> Any:
        given.append(frozenset(name for name, value in options.items() if value is False))
        return module

    monkeypatch.setattr(inductor, "compile_with_inductor", compiled)
    # Before torch 2.13, Inductor moves random operators.
    monkeypatch.setattr(support, "_KEEPS_ORDER", keeps_order)
    for body in (_body(nn.functional.dropout), _body(torch.sin)):
        Inductor().compile(body, (torch.ones(2, 3),))
    kept = frozenset() if keeps_order else frozenset(("reorder_for_locality", "reorder_for_peak_memory"))
    assert given == [kept, frozenset()]


def test_inductor_refuses_bernoulli_on_a_gpu() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        p = torch.ones(3, device="cuda")
    with pytest.raises(BackendError, match=r"other random numbers for torch\.bernoulli on a GPU"):
        Inductor().compile(_body(torch.bernoulli), (p,))
