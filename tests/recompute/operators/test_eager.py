"""Checkpoint operators in eager mode: gradients of the plain body bit for bit, and nothing of the caller's touched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.plans.helpers import bytes_alive
from tests.recompute.operators.helpers import Block, assert_bitwise, calls_in_backward, every_operator, square, step
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import GraphModule, symbolic_trace
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, set_checkpoint_debug_enabled

import partita
from partita import recompute
from partita._torch.modes import read_ambient
from partita.policies import BySize
from partita.treatments import KeepEverything, KeepNothing, Recompute


def _function(block: Block) -> Callable[..., Tensor]:
    def body(x: Tensor, scale: float = 1.0) -> Tensor:
        return block(x, scale)

    return body


def _captured(block: Block) -> nn.Module:
    return partita.capture(block, (square(block.up.in_features).detach(),), {"scale": 0.5}).module()


BODIES: dict[str, Callable[[Block], Any]] = {
    "function": _function,
    "method": lambda block: block.forward,
    "module": lambda block: block,
    "traced": symbolic_trace,
    "captured": _captured,
}
every_body = pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)


@every_operator
@every_body
def test_gradients_with_dropout_are_those_of_the_plain_body(operator: Any, make: Callable[[Block], Any]) -> None:
    block, x = Block(), square()
    body, leaves = make(block), [x, *block.parameters()]
    found = step(lambda: operator(body, x, scale=0.5).sin(), leaves)
    assert_bitwise(found, step(lambda: body(x, scale=0.5).sin(), leaves))
    assert any(leaf is not None and leaf.any() for leaf in found)


@every_operator
@every_body
def test_only_what_is_given_stays_alive(operator: Any, make: Callable[[Block], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)
            self.body = make(self.block)

        def forward(self, x: Tensor) -> Tensor:
            return operator(self.body, x, scale=0.5)

    x = square(16)
    assert bytes_alive(Model(), {"x": x}) == x.nbytes


@every_operator
def test_keyword_arguments_reach_a_graph_and_stay_as_they_are(operator: Any) -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(torch.sub, (a, b)))
    body, x = GraphModule({}, graph), square()
    before, given = str(body.graph), {"b": x, "preserve_rng_state": True, "use_reentrant": False}
    kept = dict(given)
    assert torch.equal(operator(body, x * 3, **given), x * 3 - x)
    assert given == kept
    assert str(body.graph) == before
    assert not any("recompute" in node.meta or "ac_graph_id" in node.meta for node in body.graph.nodes)


@every_operator
def test_keywords_are_divided_and_the_dict_stays_as_it_is(operator: Any) -> None:
    given = {"x": 1, "context_fn": 2, "early_stop": False, "preserve_rng_state": True, "args": 3, "debug": True}
    kept = dict(given)
    own, theirs = operator.divide_kwargs(given)
    assert own == {"context_fn": 2, "early_stop": False, "preserve_rng_state": True, "debug": True}
    assert theirs == {"x": 1, "args": 3}
    assert given == kept


@every_operator
def test_an_explicit_choice_for_random_state_is_honoured(operator: Any) -> None:
    def drop(a: Tensor) -> Tensor:
        return functional.dropout(a, 0.5, True).pow(2)

    def gradient(**options: Any) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(0)
        return torch.autograd.grad(operator(drop, x, **options).sum(), x)[0]

    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(drop(x).sum(), x)
    assert torch.equal(gradient(), expected)
    assert torch.equal(gradient(preserve_rng_state=True), expected)
    assert not torch.equal(gradient(preserve_rng_state=False), expected)


@every_operator
def test_other_options_of_a_checkpoint_are_honoured(operator: Any) -> None:
    def body(a: Tensor) -> Tensor:
        return (a.sin() @ a).cos() @ a

    def products(**options: Any) -> int:
        return calls_in_backward(operator(body, square(), **options))["mm"]

    assert products(early_stop=False) == products(early_stop=True) + 1
    assert products(determinism_check="none", debug=False) == products()
    with pytest.raises(ValueError, match="determinism_check"):
        operator(body, square(), determinism_check="banana")


@every_operator
def test_checkpoints_can_be_debugged(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch traces by a logger whose records are no text (torch 2.13), on which pytest's handlers fail.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)

    def body(a: Tensor) -> Tensor:
        return recompute.keep(torch.sin, a).cos()

    x = square()
    expected = torch.autograd.grad(x.sin().cos().sum(), x)
    assert_bitwise(torch.autograd.grad(operator(body, x, debug=True).sum(), x), expected)
    with set_checkpoint_debug_enabled(True):
        assert_bitwise(torch.autograd.grad(operator(body, x).sum(), x), expected)
        assert_bitwise(torch.autograd.grad(operator(symbolic_trace(lambda a: torch.sin(a)), x).sum(), x), (x.cos(),))


@every_operator
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_are_never_reentrant_as_in_torch(operator: Any, compiled: bool) -> None:
    x, ran = square(), []

    def body(x: Tensor) -> Tensor:
        ran.append(torch.is_grad_enabled())
        return x.sin().cos()

    def f(x: Tensor) -> Tensor:
        return operator(body, x, use_reentrant=True)

    torch._dynamo.reset()
    result = (torch.compile(f, backend="aot_eager") if compiled else f)(x)
    assert_bitwise(torch.autograd.grad(result.sum(), x), torch.autograd.grad(x.sin().cos().sum(), x))
    assert all(ran)  # A reentrant checkpoint runs its function without gradients at first.


@every_operator
def test_every_call_of_a_graph_is_tagged_in_place(operator: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.linear(x)).cos()

    first, second = symbolic_trace(Model()), symbolic_trace(Model())
    assert operator.tag_nodes(first, False) is first
    assert operator.tag_nodes(second, is_sac=True) is second
    tags = [[(node.op, node.meta.get("recompute", "none")) for node in made.graph.nodes] for made in (first, second)]
    again = CheckpointPolicy.PREFER_RECOMPUTE
    calls = ("call_module", "call_function", "call_method")
    assert tags[0] == [("placeholder", "none"), *((op, again) for op in calls), ("output", "none")]
    assert tags[1] == [("placeholder", "none"), *((op, None) for op in calls), ("output", "none")]
    numbers = [{node.meta["ac_graph_id"] for node in made.graph.nodes if node.op in calls} for made in (first, second)]
    assert list(map(len, numbers)) == [1, 1]
    assert min(numbers[0]) < min(numbers[1])


# Operands and results -----------------------------------------------------------------------------------------------


@every_operator
def test_operands_and_results_of_any_kind_pass(operator: Any) -> None:
    x = square()

    def body(*operands: Any, **keywords: Any) -> Any:
        first, pair, number, nothing, text = operands
        return {"y": first * pair[0]["k"] * number, "rest": [nothing, text, 3]}, keywords["more"][0].sin(), x

    found = operator(body, x, ({"k": x},), 2.0, None, "text", more=[x, object()])
    assert found[0]["rest"] == [None, "text", 3]
    assert found[2] is x
    expected = body(x, ({"k": x},), 2.0, None, "text", more=[x, object()])
    losses = [made[0]["y"].sum() + made[1].square().sum() for made in (found, expected)]
    assert_bitwise(*(torch.autograd.grad(loss, x) for loss in losses))


@every_operator
@pytest.mark.parametrize("result", [None, 3, (), [], {}, (None, 1)], ids=str)
def test_results_without_tensors_pass(operator: Any, result: Any) -> None:
    assert operator(lambda x: result, square()) is result


@every_operator
def test_a_body_may_fill_a_container_of_the_caller(operator: Any) -> None:
    x, kept = square(), []

    def body(a: Tensor, found: list[Tensor]) -> Tensor:
        found.append(a.sin())
        return found[-1].cos()

    (gradient,) = torch.autograd.grad(operator(body, x, kept).sum(), x)
    assert len(kept) == 1
    assert torch.equal(gradient, torch.autograd.grad(x.sin().cos().sum(), x)[0])


@every_operator
def test_an_operand_that_needs_no_gradient_gets_none(operator: Any) -> None:
    weight, x = square(), torch.ones(4, 4)
    y = operator(lambda a, w: (a @ w).sin(), x, weight)
    assert_bitwise(torch.autograd.grad(y.sum(), weight), torch.autograd.grad((x @ weight).sin().sum(), weight))
    assert not operator(lambda a: a.sin(), x).requires_grad


# Modes and errors ---------------------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_body_runs_once_and_holds_nothing(operator: Any, ambient: Any) -> None:
    calls: list[Tensor] = []
    x = square()
    with ambient():
        y = operator(lambda a: calls.append(a) or a.sin(), x)
    assert not y.requires_grad
    assert len(calls) == 1


@every_operator
def test_modes_are_as_before_when_the_body_raises(operator: Any) -> None:
    def body(x: Tensor) -> Any:
        torch._C._set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        raise KeyError(x)

    before = read_ambient()
    with pytest.raises(KeyError):
        operator(body, square())
    assert read_ambient() == before
    x = square()
    assert torch.equal(torch.autograd.grad(operator(torch.sin, x).sum(), x)[0], x.cos())


@every_operator
def test_modes_are_as_before_when_the_second_run_raises(operator: Any) -> None:
    runs: list[int] = []

    def body(x: Tensor) -> Tensor:
        runs.append(0)
        hidden = recompute.keep(torch.sin, x)
        if len(runs) == 2:
            torch._C._set_grad_enabled(False)
            raise KeyError("second")
        return hidden.cos()

    x = square()
    y = operator(body, x)
    before = read_ambient()
    with pytest.raises(KeyError, match="second"):
        y.sum().backward()
    assert read_ambient() == before
    assert torch.equal(recompute.keep(torch.sin, x), x.sin())


@every_operator
def test_a_region_sees_its_modes_again_in_the_backward(operator: Any) -> None:
    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mean()
        return (x @ x) * scale

    def run(call: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(body, x).sin()

    x = square()
    assert_bitwise(step(run, [x], operator, x), step(run, [x], lambda f, a: f(a), x))


@every_operator
def test_a_backward_that_is_transformed_computes_nested_checkpoints_again(operator: Any) -> None:
    """The levels are around the backward, and not around the bodies that it runs again."""
    x = square()

    def inner(a: Tensor) -> Tensor:
        return (a.sin() * a).exp()

    def batched(result: Tensor) -> Tensor:
        return torch.autograd.grad(result.sum(0), x, torch.eye(len(x)), is_grads_batched=True)[0]

    def tangent(result: Tensor) -> Tensor:
        with forward_ad.dual_level():
            direction = forward_ad.make_dual(torch.ones_like(x), square().detach())
            return forward_ad.unpack_dual(torch.autograd.grad(result, x, direction)[0]).tangent

    for derivative in (batched, tangent):
        found = derivative(operator(lambda a: operator(inner, a.cos()) * a.tanh(), x))
        assert torch.equal(found, derivative(inner(x.cos()) * x.tanh()))


@every_operator
def test_transforms_of_torch_func_give_the_plain_gradients(operator: Any) -> None:
    x = square().detach()
    found = torch.func.grad(lambda a: operator(lambda b: b.sin().exp(), a).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda a: a.sin().exp().sum())(x))


@pytest.mark.parametrize("keep", [KeepNothing(), KeepEverything()], ids=repr)
def test_a_backward_in_inference_mode_recomputes_outside_of_it(keep: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    module = partita.plan(partita.capture(model, (x,)), BySize(parts=1), Recompute(keep)).apply().module()
    loss = module(x).sum()
    with torch.inference_mode():
        found = torch.autograd.grad(loss, tuple(model.parameters()))
    expected = torch.autograd.grad(model(x).sum(), tuple(model.parameters()))
    assert all(map(torch.equal, found, expected))
