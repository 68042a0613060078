"""What a checkpoint keeps, by `recompute.keep` or by a context function: given back in the backward, not recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import OPERATORS, assert_bitwise, calls_in_backward, every_operator, square, step
from torch import Tensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from partita import recompute
from partita.errors import RecomputeError
from partita.recompute import operators as checkpoint_module

_checkpoint = recompute.wrap_activation_checkpoint


def _plainly(body: Callable[..., Any], *operands: Any) -> Any:
    return body(*operands)


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


def test_kept_kernels_do_not_run_again() -> None:
    def body(x: Tensor, kept: Any) -> Tensor:
        return (kept(torch.mm, x, x).sin() @ x).tanh()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x, recompute.keep), step(body, [x], x, _plainly))
    plain = calls_in_backward(body(x, _plainly))
    found = calls_in_backward(_checkpoint(body, x, recompute.keep))
    again = calls_in_backward(_checkpoint(body, x, _plainly))
    assert (found["mm"] - plain["mm"], again["mm"] - plain["mm"]) == (1, 2)
    assert found["sin"] == again["sin"] == 1


def test_all_kernels_of_a_kept_part_are_kept() -> None:
    def body(x: Tensor) -> Tensor:
        return recompute.keep(lambda a: (a @ a).sin() @ a, x).tanh()

    x = square()
    plain = calls_in_backward(((x @ x).sin() @ x).tanh())
    found = calls_in_backward(_checkpoint(body, x))
    assert (found["mm"], found["sin"], found["tanh"]) == (plain["mm"], 0, 1)


@pytest.mark.parametrize("kept", ["first", "second", "both", "neither"])
def test_masks_are_right_whichever_dropout_is_kept(kept: str) -> None:
    def body(x: Tensor, first: Any, second: Any) -> Tensor:
        return _drop(second(_drop, first(_drop, x.sin()).exp()).tanh())

    first = recompute.keep if kept in ("first", "both") else _plainly
    second = recompute.keep if kept in ("second", "both") else _plainly
    x = square(8)
    assert_bitwise(step(_checkpoint, [x], body, x, first, second), step(body, [x], x, _plainly, _plainly))
    if kept == "both":
        assert calls_in_backward(_checkpoint(body, x, first, second))["bernoulli_"] == 1


def test_views_of_a_kept_part_are_made_again() -> None:
    def body(x: Tensor) -> Tensor:
        return recompute.keep(lambda a: a.exp().t()[1:], x).sin()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x), step(lambda a: a.exp().t()[1:].sin(), [x], x))
    assert calls_in_backward(_checkpoint(body, x))["exp"] == 0


def test_writes_inside_a_kept_part_are_kept_with_it() -> None:
    def body(x: Tensor) -> Tensor:
        return recompute.keep(lambda a: a.mul(3).add_(1).t_(), x).sin()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x), step(lambda a: a.mul(3).add_(1).t_().sin(), [x], x))
    y = _checkpoint(lambda a: recompute.keep(lambda b: b.exp().add_(1), a).sin(), x)
    with pytest.raises(RecomputeError, match="mutates a tensor that the backward needs"):
        y.sum().backward()


def test_writes_of_a_kept_part_to_what_is_not_kept_are_done_again() -> None:
    def body(x: Tensor, kept: Any) -> Tensor:
        hidden, other = x.mul(3), x.mul(2)
        kept(lambda a: a.mul_(2).add_(1), hidden)
        kept(torch._foreach_mul_, [hidden, other], 2.0)
        return hidden.sin() * other.exp()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x, recompute.keep), step(body, [x], x, _plainly))


def test_results_of_several_kinds_are_kept() -> None:
    def body(x: Tensor, kept: Any) -> Tensor:
        values, places = kept(torch.sort, x)
        parts = kept(lambda a: {"mean": a.mean(), "none": None, "list": [a.exp(), 3]}, values)
        return (values.gather(1, places) * parts["mean"] + parts["list"][0]).sin()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x, recompute.keep), step(body, [x], x, _plainly))
    assert calls_in_backward(_checkpoint(body, x, recompute.keep))["sort"] == 0


def test_weights_that_autocast_has_cast_before_are_no_part_of_what_is_kept() -> None:
    weight = square()

    def body(x: Tensor, kept: Any) -> Tensor:
        return kept(torch.mm, kept(torch.mm, x, weight).sin(), weight).exp()

    def run(call: Any, kept: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(body, x @ weight, kept) + call(body, x, kept)

    x = square()
    found = step(run, [x, weight], _checkpoint, recompute.keep, x)
    assert_bitwise(found, step(run, [x, weight], _plainly, _plainly, x))


def test_views_that_are_made_in_inference_mode_keep_their_history() -> None:
    def body(x: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            flat = kept(torch.reshape, x, (-1,))
        return flat, x.sin().exp()

    x = square()
    found, expected = _checkpoint(body, x, recompute.keep), body(x, _plainly)
    assert found[0].requires_grad == expected[0].requires_grad
    assert torch.equal(torch.autograd.grad(found[1].sum(), x)[0], torch.autograd.grad(expected[1].sum(), x)[0])


def test_outside_of_a_checkpoint_keep_only_calls() -> None:
    x = square()
    assert_bitwise(step(recompute.keep, [x], lambda a: _drop(a.sin()), x), step(lambda a: _drop(a.sin()), [x], x))
    assert recompute.keep(lambda a: a, x) is x


@pytest.mark.parametrize("kept", [recompute.keep, _plainly], ids=["keep", "nothing kept"])
def test_a_second_backward_gives_the_same(kept: Any) -> None:
    def body(x: Tensor) -> Tensor:
        return _drop(kept(_drop, x.sin()).exp()).tanh()

    def twice(function: Callable[..., Tensor]) -> list[Tensor]:
        x = square(8)
        torch.manual_seed(0)
        y = function(x)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return [first, second, *torch.autograd.grad(y.sum(), x)]

    assert_bitwise(twice(partial(_checkpoint, body)), twice(body))


@pytest.mark.parametrize("kept", [recompute.keep, _plainly], ids=["keep", "nothing kept"])
def test_the_gradient_of_a_gradient_is_that_of_the_plain_body(kept: Any) -> None:
    def second(function: Callable[..., Tensor]) -> Tensor:
        x = square()
        torch.manual_seed(0)
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def body(x: Tensor) -> Tensor:
        return kept(_drop, x.sin()).pow(3)

    assert torch.equal(second(partial(_checkpoint, body)), second(body))


def test_a_kept_result_that_is_written_later_is_an_error_that_names_its_operator() -> None:
    taken: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        taken.append(recompute.keep(torch.sin, x))
        return taken[-1].cos()

    y = _checkpoint(body, square())
    with torch.no_grad():
        taken[0].add_(1)
    with pytest.raises(RecomputeError, match=r"a result of aten\.sin\.default was kept .* and then mutated"):
        y.sum().backward()


def test_a_kept_part_that_does_something_else_the_second_time_is_an_error() -> None:
    operators = [torch.sin, torch.cos]
    y = _checkpoint(lambda x: recompute.keep(lambda a: operators.pop(0)(a), x).exp(), square())
    with pytest.raises(RecomputeError, match=r"met aten\.cos\.default where the first run did not"):
        y.sum().backward()


# Nested regions, regions used twice, parts of a backward ------------------------------------------------------------


@pytest.mark.parametrize("inner", OPERATORS.values(), ids=OPERATORS)
@every_operator
@pytest.mark.parametrize("kept", [recompute.keep, _plainly], ids=["keep", "nothing kept"])
def test_nested_regions_give_the_plain_gradients(operator: Any, inner: Any, kept: Any) -> None:
    weight = square()

    def innermost(x: Tensor) -> Tensor:
        return _drop(kept(torch.mm, x, weight).sin())

    def middle(run: Any, x: Tensor) -> Tensor:
        return kept(_drop, run(innermost, x).exp()) @ run(innermost, x)

    def outer(run: Any, x: Tensor) -> Tensor:
        return run(partial(middle, run), _drop(x)).tanh() + run(partial(middle, run), x)

    x = square()
    found = step(lambda: operator(partial(outer, inner), x).sin(), [x, weight])
    assert_bitwise(found, step(lambda: outer(_plainly, x).sin(), [x, weight]))


def test_a_kept_part_keeps_the_regions_inside_of_it() -> None:
    def body(x: Tensor, run: Any, kept: Any) -> Tensor:
        return kept(lambda a: run(lambda b: kept(_drop, b.sin()).exp(), a) * 2, x).tanh()

    x = square()
    assert_bitwise(step(_checkpoint, [x], body, x, _checkpoint, recompute.keep), step(body, [x], x, _plainly, _plainly))


@every_operator
def test_a_region_used_twice_has_its_own_masks_each_time(operator: Any) -> None:
    weight = square()

    def body(x: Tensor) -> Tensor:
        return recompute.keep(_drop, (x @ weight).sin()).exp()

    def run(call: Any, x: Tensor) -> Tensor:
        return call(body, call(body, x)) + call(body, x)

    x = square()
    assert_bitwise(step(run, [x, weight], operator, x), step(run, [x, weight], _plainly, x))


@every_operator
def test_several_losses_go_back_one_after_the_other(operator: Any) -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = recompute.keep(_drop, x.sin())
        return hidden.exp(), _drop(hidden).tanh(), hidden.cos()

    def run(call: Any) -> list[Tensor]:
        x = square()
        torch.manual_seed(0)
        first, second, _ = call(body, x * 2)
        losses = (first.sum(), second.square().sum(), (first * second).sum())
        return [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]

    assert_bitwise(run(operator), run(_plainly))


@every_operator
def test_the_gradient_of_a_part_is_that_of_the_plain_body(operator: Any) -> None:
    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = _drop(x @ w)
        return hidden.sin(), (hidden @ w).tanh()

    x, w = square(), square()
    for result in (0, 1):
        for leaves in ([x], [w]):
            found = step(lambda result=result: operator(body, x, w)[result], leaves)
            assert_bitwise(found, step(lambda result=result: body(x, w)[result], leaves))


@every_operator
def test_results_that_nobody_uses_cost_no_backward(operator: Any) -> None:
    def body(a: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin().exp(), (a @ a).tanh() @ a

    x = square()
    used = operator(body, x)[0]
    assert torch.equal(torch.autograd.grad(used.sum(), x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])
    found = calls_in_backward(operator(body, x)[0])
    # torch computes all that was saved again, whoever it was saved for; the last product saves nothing new.
    assert (found["sin"], found["exp"], found["mm"], found["tanh"]) == (1, 1, 1, 1)
    assert (found["cos"], found["tanh_backward"]) == (1, 0)
    assert not operator(lambda a: (a.detach().sin(), a.exp())[0], x).requires_grad


def test_threads_keep_their_own_results() -> None:
    def train(results: list[Tensor]) -> None:
        x = square()
        y = _checkpoint(lambda a: recompute.keep(torch.sin, a).exp().tanh(), x)
        results += torch.autograd.grad(y.sum(), x)

    results: list[Tensor] = []
    workers = [threading.Thread(target=train, args=(results,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    x = square()
    assert_bitwise(results, [torch.autograd.grad(x.sin().exp().tanh().sum(), x)[0]] * 4)


# Selective contexts -------------------------------------------------------------------------------------------------


def _products(a: Tensor) -> Tensor:
    return functional.dropout((a @ a).tanh(), 0.5, True) @ a


_KEEPING_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


@every_operator
@pytest.mark.parametrize("place", ["argument", "metadata"])
def test_a_context_function_keeps_what_it_says(operator: Any, place: str) -> None:
    def run(x: Tensor) -> Tensor:
        if place == "argument":
            return operator(_products, x, context_fn=_KEEPING_PRODUCTS)
        body = symbolic_trace(_products)
        body.meta["_checkpoint_context_fn"] = _KEEPING_PRODUCTS
        return operator(body, x)

    x = square()
    assert_bitwise(step(run, [x], x), step(_products, [x], x))
    found, plain = calls_in_backward(run(x)), calls_in_backward(_products(x))
    assert found["mm"] == plain["mm"]
    assert found["tanh"] == 1
    assert calls_in_backward(operator(_products, x))["mm"] == plain["mm"] + 1


def test_a_traced_context_function_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint_module._warn_of_mutation.cache_clear()
    with caplog.at_level("WARNING", logger="partita.recompute"):
        for operator in (*OPERATORS.values(), *OPERATORS.values()):
            make_fx(partial(operator, _products, context_fn=_KEEPING_PRODUCTS))(square())
    (record,) = [record for record in caplog.records if "context function" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert "in place" in record.getMessage()
