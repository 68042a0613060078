"""Training steps through compiled pieces without the wrappers of AOTAutograd: as with them, and as in eager mode."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import Context, ContextVar
from typing import Any

import pytest
import torch
from tests.helpers.torch_versions import HAS_CONTEXT_OF_BACKWARD
from tests.torch_compile.helpers import compiled
from tests.torch_compile.test_direct_calls import python_calls
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from partita.torch_compile._torch import direct_training, trained_together
from partita.torch_compile._torch.direct_training import in_context_of_backward, trained_directly
from partita.treatments import Call, Recompute, Treatment


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale + self.shift)
        return torch.sigmoid(x * x - self.shift) + x


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x)) + 1)) + x


class Model(nn.Module):
    def __init__(self, count: int = 3, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Trained:
    """A model, its compiled form after steps that made its calls direct, and a twin in eager mode."""

    def __init__(self, model: nn.Module, *, x: Tensor | None = None, warm: int = 2, **options: Any) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.call = compiled(model, **options)
        self.x = torch.randn(4, 6) if x is None else x
        for _ in range(warm):
            self.call(self.x).square().mean().backward()
        model.zero_grad()

    def assert_alike(self, x: Tensor | None = None, **tolerance: Any) -> None:
        """One step more of both; the gradients accumulate."""
        x = self.x if x is None else x
        found, expected = self.call(x), self.twin(x)
        torch.testing.assert_close(found, expected, **tolerance)
        found.square().mean().backward()
        expected.square().mean().backward()
        self.assert_same_gradients(**tolerance)

    def assert_same_gradients(self, **tolerance: Any) -> None:
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, **tolerance)


def is_direct(value: Tensor) -> bool:
    """Whether the last piece was called without wrappers."""
    made: Any = value.grad_fn
    return made._forward_cls.backward.__module__ in (direct_training.__name__, trained_together.__name__)


def test_a_layer_more_is_few_python_calls_more() -> None:
    def calls(count: int) -> int:
        trained = Trained(Model(count))
        assert is_direct(trained.call(trained.x))
        return python_calls(lambda: trained.call(trained.x).square().mean().backward())

    # Forward and backward, each with what the engine of torch calls around them.
    assert calls(6) - calls(3) <= 3 * 16


def test_gradients_are_those_of_eager_mode() -> None:
    trained = Trained(Model())
    for _ in range(3):
        trained.assert_alike()


def test_a_gradient_with_other_strides_is_laid_out_as_the_backward_expects() -> None:
    trained = Trained(Model())
    for model in (trained.call, trained.twin):
        model(trained.x).sum().backward()
        model(trained.x).backward(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t())
    trained.assert_same_gradients()


def test_two_forwards_before_their_backwards_keep_their_own_values() -> None:
    trained = Trained(Model())
    xs = [torch.randn(4, 6) for _ in range(2)]
    for model in (trained.call, trained.twin):
        first, second = map(model, xs)
        first.sum().backward()
        second.square().sum().backward()
    trained.assert_same_gradients()


def test_a_layer_that_is_called_twice_gets_the_sum_of_its_gradients() -> None:
    model = Model(4)
    model.layers[2] = model.layers[0]
    Trained(model).assert_alike()


def test_a_saved_tensor_that_was_mutated_is_an_error() -> None:
    trained = Trained(Model())
    found = trained.call(trained.x)
    assert is_direct(found)
    with torch.no_grad():
        trained.model.layers[1].scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_a_second_backward_is_an_error_and_so_is_a_kept_graph_whose_buffers_are_donated() -> None:
    trained = Trained(Model(3, Wide))
    found = trained.call(trained.x).square().mean()
    found.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        found.backward()
    found = trained.call(trained.x).square().mean()
    with pytest.raises(RuntimeError, match="donated"):
        found.backward(retain_graph=True)


def test_a_graph_that_is_kept_at_the_first_backward_can_be_kept_at_all() -> None:
    trained = Trained(Model(), warm=0)
    for _ in range(3):
        for model in (trained.call, trained.twin):
            loss = model(trained.x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    trained.assert_same_gradients()


def test_a_backward_of_the_backward_is_an_error() -> None:
    trained = Trained(Model(), warm=0)
    for _ in range(3):
        x = trained.x.clone().requires_grad_()
        loss = trained.call(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_hooks_on_saved_tensors_are_called() -> None:
    trained = Trained(Model())
    packed, unpacked = [], []

    def pack(value: Tensor) -> Tensor:
        packed.append(value)
        return value

    def unpack(value: Tensor) -> Tensor:
        unpacked.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = trained.call(trained.x)
    found.square().mean().backward()
    assert len(packed) == len(unpacked) >= 6
    trained.twin(trained.x).square().mean().backward()
    trained.assert_same_gradients()


def test_hooks_on_parameters_and_inputs_get_their_gradients_once() -> None:
    trained = Trained(Model())
    seen: dict[str, list[Tensor]] = {"found": [], "expected": []}
    for name, model, owner in (("found", trained.call, trained.model), ("expected", trained.twin, trained.twin)):
        weight = owner.layers[1].scale
        weight.register_hook(seen[name].append)
        weight.register_post_accumulate_grad_hook(lambda one, name=name: seen[name].append(one.grad.clone()))
        x = trained.x.clone().requires_grad_()
        x.register_hook(seen[name].append)
        model(x).square().mean().backward()
    torch.testing.assert_close(seen["found"], seen["expected"])
    assert len(seen["found"]) == 3


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> None:
        return None


def test_a_result_without_a_gradient_leaves_parameters_without_one() -> None:
    trained = Trained(Model())
    for model in (trained.call, trained.twin):
        _NoGradient.apply(model(trained.x)).sum().backward()
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    trained.assert_same_gradients()


def test_some_gradients_can_be_asked_for() -> None:
    trained = Trained(Model())
    found, expected = (
        torch.autograd.grad(model(trained.x).square().mean(), [owner.layers[1].shift, owner.layers[2].scale])
        for model, owner in ((trained.call, trained.model), (trained.twin, trained.twin))
    )
    torch.testing.assert_close(found, expected)


def test_all_sizes_are_trained_by_one_function() -> None:
    trained = Trained(Model(), dynamic=True)
    for size in (5, 7, 4, 5):
        trained.assert_alike(torch.randn(size, 6))


def test_autocast_around_the_model_trains_as_in_eager_mode() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trained = Trained(Model(3, Wide))
        found, expected = trained.call(trained.x), trained.twin(trained.x)
    assert is_direct(found)
    for value in (found, expected):
        value.float().square().mean().backward()
    trained.assert_same_gradients(rtol=0.05, atol=0.05)


def test_a_backward_under_autocast_is_that_of_aotautograd() -> None:
    trained = Trained(Model())
    found = trained.call(trained.x).square().mean()
    with torch.autocast("cpu", torch.bfloat16):
        found.backward()
    trained.twin(trained.x).square().mean().backward()
    trained.assert_same_gradients()


def test_calls_without_gradients_after_training_and_the_other_way_round() -> None:
    trained = Trained(Model())
    for mode in (torch.no_grad, torch.inference_mode, nullcontext):
        with mode():
            torch.testing.assert_close(trained.call(trained.x), trained.twin(trained.x))
        trained.assert_alike()


def test_a_backward_while_dynamo_runs_is_not_compiled() -> None:
    trained = Trained(Model())
    loss = trained.call(trained.x).square().mean()

    def step(x: Tensor) -> Tensor:
        y = torch.sin(x)
        loss.backward()
        return torch.cos(y)

    counters.clear()
    torch.compile(step, backend="eager")(torch.randn(3))
    # Those of the step, two more before torch 2.13; a backward of three layers has tens of them.
    assert counters["frames"]["ok"] <= 6
    trained.twin(trained.x).square().mean().backward()
    trained.assert_same_gradients()


CALLER = ContextVar("caller", default="nobody")


@HAS_CONTEXT_OF_BACKWARD
def test_the_code_of_a_backward_gets_the_context_variables_of_its_caller() -> None:
    def seen() -> str:
        return Context().run(in_context_of_backward, CALLER.get)  # As in a thread of the engine.

    found: list[str] = []
    result = torch.ones(2, requires_grad=True).exp()
    result.register_hook(lambda _: found.append(seen()))
    token = CALLER.set("user")
    result.sum().backward()
    CALLER.reset(token)
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert [*found, pool.submit(seen).result()] == ["user", "nobody"]


def test_compiled_autograd_takes_the_backward_apart() -> None:
    trained = Trained(Model())
    found = trained.call(trained.x).square().mean()
    assert is_direct(trained.call(trained.x))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        found.backward()
    trained.twin(trained.x).square().mean().backward()
    trained.assert_same_gradients()


def test_other_settings_at_the_backward_are_refused_as_by_aotautograd() -> None:
    trained = Trained(Model())
    found = trained.call(trained.x).square().mean()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            found.backward()
    finally:
        torch.use_deterministic_algorithms(False)


class _WithMask(nn.Module):
    """Two results, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x * self.scale) * mask
        return torch.sigmoid(hidden) * x + hidden, (hidden.detach() > 0).float() * mask + 1


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_WithMask() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for layer in self.layers:
            x, mask = layer(x, mask)
        return x


def test_results_without_gradients_are_passed_on() -> None:
    trained = Trained(_Masked())
    assert is_direct(trained.call(trained.x))
    trained.assert_alike()


class _Streams(nn.Module):
    """Two results with gradients, which depend on different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.randn(2, 6).unbind()) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x, x * 2
        for up, down in self.layers:
            one, other = torch.tanh(up * one) + torch.sigmoid(one), torch.tanh(down * other) * torch.sigmoid(other) + 1
        return one, other


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_a_stream_that_is_not_used_has_no_gradients(used: tuple[bool, bool]) -> None:
    model = _Streams()
    twin, call, x = copy.deepcopy(model), compiled(model), torch.randn(4, 6)
    for _ in range(3):
        for one in (call, twin):
            results = one(x)
            sum(value.square().mean() for value, is_used in zip(results, used, strict=True) if is_used).backward()
    assert all(map(is_direct, call(x)))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


class _EndsInView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(torch.sigmoid(x) + x * 2 - 1).view(2, 2, 6)).view(4, 6)


@pytest.mark.parametrize("treatment", [Call(), Recompute()])
def test_a_result_that_is_a_view_of_what_was_computed_can_be_mutated(treatment: Treatment) -> None:
    trained = Trained(Model(3, _EndsInView), inner="aot_eager", treatment=treatment)
    assert is_direct(trained.call(trained.x))
    for model in (trained.call, trained.twin):
        model(trained.x).mul_(2).square().mean().backward()
    trained.assert_same_gradients()


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.abs(x * self.scale) + 1 + self.shift * 1 + 1, 0.5)


def test_the_backward_drops_what_the_forward_dropped() -> None:
    model = Model(3, _Drops)
    trained = Trained(model, x=torch.ones(64, 6))
    found = trained.call(trained.x)
    assert is_direct(found)
    found.sum().backward()
    kept = (found != 0).float()
    assert 0 < kept.mean() < 1
    torch.testing.assert_close(model.layers[-1].shift.grad, (2 * kept).sum(0))


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x * 2) + 1) + torch.sigmoid(x)


@pytest.mark.slow
def test_layers_that_mutate_buffers_keep_their_wrappers() -> None:
    trained = Trained(Model(3, _Norm), warm=0)
    for _ in range(3):
        assert not is_direct(trained.call(trained.x.clone()))
        trained.twin(trained.x)
        trained.assert_alike()
    for one, other in zip(trained.model.buffers(), trained.twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_function_that_is_not_known_is_left_alone_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=direct_training.__name__):
        assert trained_directly(lambda *args: args, input_count=1) is None
    assert "compiled in another way" in caplog.text


def test_copies_of_a_compiled_model_train_on_their_own() -> None:
    trained = Trained(Model())
    other = copy.deepcopy(trained.call)
    other(trained.x).square().mean().backward()
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    trained.assert_alike()
