"""Capability inside torch.compile: what a compiler takes is compiled, the rest runs between, and no graph breaks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from tests.torch_compile.helpers import Recorder, assert_trains_like_eager, compiled
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule, Node

from partita.errors import CallbackError, LoweringError
from partita.policies import ByCapability
from partita.testing.captured import Attention, Buffered, Casting, Frozen, Mixer
from partita.treatments import Lower


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


def without(*names: str) -> Any:
    """A refusal function by what a node calls."""

    def refusal(node: Node) -> str | None:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return f"no {called}" if called in names else None

    return refusal


def called(parts: Sequence[GraphModule]) -> list[list[str]]:
    """What each part calls, mode toggles left out."""
    found = [
        [
            node.target if isinstance(node.target, str) else node.target.__name__
            for node in part.graph.nodes
            if _runs(node)
        ]
        for part in parts
    ]
    return [[name for name in names if "grad_enabled" not in name and "autocast" not in name] for names in found]


def _runs(node: Node) -> bool:
    return node.op in ("call_function", "call_method")


def summed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cumsum((x @ weight).sin(), 0).cos() @ weight


def test_what_is_refused_runs_between_compiled_parts_of_one_graph() -> None:
    torch._dynamo.utils.counters.clear()
    recorder, graphs = Recorder(), torch._dynamo.utils.counters["stats"]
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    result = compiled(summed, policy=ByCapability(without("cumsum")), inner=recorder)(x, weight)
    assert called(recorder.parts) == [["matmul", "sin"], ["cos", "matmul"]]
    assert graphs["unique_graphs"] == 1
    assert torch.equal(result, summed(x, weight))
    result.sum().backward()
    found, weight.grad = weight.grad, None
    summed(x, weight).sum().backward()
    assert torch.equal(found, weight.grad)


#: What is refused of each model, so that something is compiled before and after it.
REFUSED: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("softmax", "chunk"),
    Buffered: ("mul_", "tanh"),
    Casting: ("sigmoid",),
    Frozen: ("sin", "tanh"),
    Mixer: ("batch_norm", "dropout"),
}


@pytest.mark.parametrize("modes_apart", [True, False], ids=["modes_apart", "modes_mixed"])
@pytest.mark.parametrize("model", REFUSED)
def test_training_is_that_of_eager_mode(model: type[nn.Module], modes_apart: bool) -> None:
    recorder = Recorder()
    policy = ByCapability(without(*REFUSED[model]), modes_apart=modes_apart)
    assert_trains_like_eager(model(), policy=policy, inner=recorder)
    assert recorder.parts
    assert not {name for names in called(recorder.parts) for name in names} & set(REFUSED[model])


def test_what_inductor_takes_is_trained_by_inductor() -> None:
    recorder = Recorder("inductor")
    assert_trains_like_eager(Frozen(), policy=ByCapability("inductor"), inner=recorder, exact=False)
    assert [len(names) > 0 for names in called(recorder.parts)] == [True] * 3  # Before, in and after the no_grad block.


def test_after_a_block_the_callers_mode_is_that_of_before() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin()
        with torch.no_grad():
            frozen = x.cos()
        return first.exp(), frozen

    recorder, x = Recorder(), torch.randn(4, requires_grad=True)
    found = compiled(model, policy=ByCapability(without()), inner=recorder)(x)
    assert sorted(called(recorder.parts)) == [["cos"], ["sin", "exp"]]
    assert [output.requires_grad for output in found] == [True, False]
    with torch.no_grad():
        assert not compiled(model, policy=ByCapability(without()), inner="aot_eager")(x)[0].requires_grad


def test_one_graph_serves_many_sizes() -> None:
    recorder = Recorder()
    policy = ByCapability(without("softmax"))
    assert_trains_like_eager(Attention(), sizes=(4, 7, 5), policy=policy, inner=recorder, dynamic=True)
    assert len({str(part.meta["dynamo_compile_id"]) for part in recorder.parts}) == 1


def test_sizes_that_depend_on_data_may_be_refused() -> None:
    def select(x: Tensor) -> Tensor:
        return x.sin()[(x > 0).nonzero()].exp().sum()

    recorder = Recorder()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(select, policy=ByCapability(without("nonzero")), inner=recorder)
        for x in (torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, -1.0, -1.0])):
            assert torch.equal(call(x), select(x))
    assert len(recorder.parts) == 2
    assert not any("nonzero" in names for names in called(recorder.parts))


def test_random_numbers_come_in_their_order_whichever_part_generates_them() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return nn.functional.dropout(x), torch.bernoulli(x.sigmoid()), nn.functional.dropout(x.sin())

    x = torch.randn(16)
    call = compiled(model, policy=ByCapability(without("bernoulli")), inner="aot_eager")
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found = call(x)
        torch.manual_seed(seed)
        assert all(map(torch.equal, found, model(x)))


def test_the_options_of_the_policy_hold() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cumsum(x.sin(), 0).cos().exp().tan()

    x = torch.randn(4)
    small = Recorder()
    result = compiled(model, policy=ByCapability(without("cumsum"), min_size=2), inner=small)(x)
    assert called(small.parts) == [["cos", "exp", "tan"]]
    cut = Recorder()
    torch.compiler.reset()
    assert torch.equal(compiled(model, policy=ByCapability(without("cumsum"), max_size=2), inner=cut)(x), result)
    assert called(cut.parts) == [["sin"], ["cos", "exp"], ["tan"]]
    assert torch.equal(result, model(x))


@dataclass(frozen=True)
class Failing:
    """A backend that takes everything and then cannot compile it."""

    name: ClassVar[str] = "failing"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        raise RuntimeError("out of luck")


def test_a_region_that_cannot_be_lowered_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    policy = ByCapability(without("cumsum"))
    call = compiled(summed, policy=policy, treatment=Lower(Failing()))
    with caplog.at_level(logging.WARNING, "partita"):
        assert torch.equal(call(x, weight), summed(x, weight))
    assert [record.getMessage() for record in caplog.records] == [
        "refusal_0: failing failed: out of luck; it runs eagerly",
        "refusal_1: failing failed: out of luck; it runs eagerly",
    ]
    torch.compiler.reset()
    with pytest.raises(LoweringError, match="out of luck"):
        compiled(summed, policy=policy, treatment=Lower(Failing(), strict=True))(x, weight)


def test_a_treatment_that_lowers_trains_inside_torch_compile() -> None:
    lower = Lower("aot_eager", strict=True)
    assert_trains_like_eager(Mixer(), policy=ByCapability(without("dropout")), treatment=lower)


def test_a_refusal_function_that_raises_is_named_with_the_node() -> None:
    def refusal(node: Node) -> str | None:
        raise KeyError(node.name)

    with pytest.raises(BackendCompilerFailed, match="'refusal' raised KeyError for node 'sin'") as raised:
        compiled(lambda x: x.sin(), policy=ByCapability(refusal))(torch.randn(4))
    assert isinstance(raised.value.inner_exception, CallbackError)
