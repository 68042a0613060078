"""What is kept of parts that write and cast: each operator that runs again reads what it read in the first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.plans.helpers import bytes_alive
from tests.recompute.operators.helpers import assert_bitwise, calls_in_backward, square, step
from torch import Tensor, nn

import partita
from partita import recompute
from partita.policies import BySize
from partita.treatments import KeepOperators, Recompute

_checkpoint = recompute.wrap_activation_checkpoint


def _plainly(body: Callable[..., Any], *operands: Any) -> Any:
    return body(*operands)


def _write_cast_write(h: Tensor) -> Tensor:
    h.mul_(2)
    cast = h.to(torch.float64)
    h.add_(1)
    return cast


def _in_autocast(function: Callable[..., Any], *args: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return function(*args)


@pytest.mark.parametrize("run", [_plainly, _in_autocast], ids=["plain", "autocast"])
@pytest.mark.parametrize("own", [True, False], ids=["memory of the part", "memory from before"])
def test_a_cast_between_two_writes_has_the_value_of_the_first(run: Any, own: bool) -> None:
    def part(h: Tensor) -> Tensor:
        return _write_cast_write(h * 1 if own else h)

    def body(x: Tensor, kept: Any) -> Tensor:
        h = x * 1
        return kept(part, h).sin() + h

    x = square()
    found = step(run, [x], _checkpoint, body, x, recompute.keep)
    assert_bitwise(found, step(run, [x], body, x, _plainly))


@pytest.mark.parametrize("own", [True, False], ids=["memory of the part", "memory from before"])
def test_what_autocast_casts_is_read_before_it_is_written(own: bool) -> None:
    weight = square()

    def part(h: Tensor) -> Tensor:
        h = h * 1 if own else h
        h.mul_(2)
        product = h @ weight
        h.add_(1)
        return product

    def body(x: Tensor, kept: Any) -> Tensor:
        h = x * 1
        return kept(part, h).sin() + h

    x = square()
    found = step(_in_autocast, [x, weight], _checkpoint, body, x, recompute.keep)
    assert_bitwise(found, step(_in_autocast, [x, weight], body, x, _plainly))


def test_a_weight_that_a_part_writes_is_cast_as_it_was() -> None:
    weight = square()

    def part(copied: Tensor) -> Tensor:
        with torch.no_grad():
            copied.mul_(2)
        cast = copied.to(torch.bfloat16)
        with torch.no_grad():
            copied.add_(1)
        return cast

    def body(x: Tensor, kept: Any) -> Tensor:
        copied = weight.detach().clone().requires_grad_()
        return x * kept(part, copied).float().sin()

    x = square()
    for run in (_plainly, _in_autocast):
        found = step(run, [x], _checkpoint, body, x, recompute.keep)
        assert_bitwise(found, step(run, [x], body, x, _plainly))


def test_memory_that_is_written_again_and_again_is_copied_once() -> None:
    class Births(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                copies.append(torch.multiprocessing.reductions.StorageWeakRef(result.untyped_storage()))
            return result

    def body(x: Tensor) -> Tensor:
        h = x * 3
        recompute.keep(lambda a: a.mul_(2).add_(1).mul_(3), h)
        return h.sin()

    copies: list[Any] = []
    with Births():
        y = _checkpoint(body, square())
    assert sum(not copy.expired() for copy in copies) == 1
    assert torch.equal(y, (((square() * 3) * 2 + 1) * 3).sin())


class _Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).to(torch.float64).sin().to(torch.float32))


def test_a_kept_cast_is_held_as_the_plan_says() -> None:
    x = torch.randn(16, 16)
    program = partita.capture(_Casts(), (), {"x": x})
    plan = partita.plan(program, BySize(parts=1), Recompute(KeepOperators("aten.to")))
    after = plan.apply()
    assert bytes_alive(after.module(), {"x": x}) == plan.saved_memory().total.treated_bytes
    partita.verify(program, after, (), {"x": x})


@pytest.mark.parametrize("run", [_plainly, _in_autocast], ids=["plain", "autocast"])
def test_a_kept_cast_is_not_made_again(run: Any) -> None:
    def body(x: Tensor, kept: Any) -> Tensor:
        return kept(torch.Tensor.to, x.sin(), torch.float64).cos()

    x = square()
    plain = calls_in_backward(run(body, x, _plainly))["_to_copy"]
    found = run(_checkpoint, body, x, recompute.keep)
    assert calls_in_backward(found)["_to_copy"] == plain
    assert_bitwise(step(run, [x], _checkpoint, body, x, recompute.keep), step(run, [x], body, x, _plainly))


@pytest.mark.parametrize("first", ["weight", "hidden"])
def test_casts_of_weights_are_told_from_kept_casts_of_the_same_shape(first: str) -> None:
    weight = square()

    def part(h: Tensor) -> tuple[Tensor, Tensor]:
        h = h * 1
        product = weight @ h if first == "weight" else h @ weight
        h.add_(1)
        return product, h.to(torch.bfloat16)

    def body(x: Tensor, kept: Any) -> Tensor:
        product, cast = kept(part, x.float().sin())
        return product.sin() + cast.cos()

    def run(call: Any, kept: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(body, x @ weight, kept) + call(body, x, kept)

    x = square()
    found = step(run, [x, weight], _checkpoint, recompute.keep, x)
    assert_bitwise(found, step(run, [x, weight], _plainly, _plainly, x))


def test_autocast_may_remember_a_weight_in_the_second_run_only() -> None:
    weight = square()

    def body(x: Tensor, kept: Any) -> Tensor:
        for _ in range(2):
            x = kept(_in_autocast, torch.mm, x, weight).sin().float()
        return x

    x = square()
    found = step(_checkpoint, [x, weight], body, x, recompute.keep)
    assert_bitwise(found, step(body, [x, weight], x, _plainly))
