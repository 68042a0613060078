"""What is kept and several backwards: each finds what it needs, and none holds what it has used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import assert_bitwise, calls_in_backward, every_operator, square
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import partita
from partita import recompute
from partita.policies import BySize
from partita.treatments import KeepEverything, KeepNothing, KeepOperators, Recompute


def _plainly(body: Callable[..., Any], *operands: Any) -> Any:
    return body(*operands)


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


class _Two(nn.Module):
    """Two results that share nothing."""

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return _drop(x.sin()).cos(), _drop(z.sin()).exp() * z


def _gradients(call: Callable[..., Any], order: tuple[int, ...]) -> list[Tensor | None]:
    """The gradients of independent losses, one backward after the other, and what is drawn next."""
    x, z = square(), square()
    torch.manual_seed(0)
    results = call(x, z)
    for place in order:
        results[place].sum().backward()
    return [x.grad, z.grad, torch.rand(2)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("keep", [KeepNothing(), KeepOperators("aten.sin", "aten.dropout"), KeepEverything()], ids=str)
def test_independent_losses_need_no_retained_graph(keep: Any, order: tuple[int, ...]) -> None:
    program = partita.capture(_Two(), (square(), square()))
    after = partita.plan(program, BySize(parts=1), Recompute(keep)).apply()
    assert_bitwise(_gradients(after.module(), order), _gradients(_Two(), order))


@every_operator
@pytest.mark.parametrize("preserves", [True, False])
def test_independent_losses_by_hand_have_their_own_masks(operator: Any, preserves: bool) -> None:
    def body(x: Tensor, z: Tensor, kept: Any = recompute.keep) -> tuple[Tensor, Tensor]:
        return kept(_drop, x.sin()).cos(), kept(_drop, z.sin()).exp() * z

    found = _gradients(lambda x, z: operator(body, x, z, preserve_rng_state=preserves), (0, 1))
    assert_bitwise(found, _gradients(lambda x, z: body(x, z, _plainly), (0, 1)))


def test_a_part_that_writes_is_there_for_the_second_loss() -> None:
    def body(x: Tensor, z: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
        hidden = z * 2
        kept(lambda a: a.mul_(3).add_(1), hidden)
        return kept(torch.sin, x).cos(), kept(torch.sin, hidden).cos()

    found = _gradients(lambda x, z: recompute.wrap_activation_checkpoint(body, x, z, recompute.keep), (0, 1))
    assert_bitwise(found, _gradients(lambda x, z: body(x, z, _plainly), (0, 1)))


def test_losses_of_which_some_retain_the_graph() -> None:
    def body(x: Tensor, z: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
        return kept(_drop, x.sin()).cos(), kept(_drop, z.sin()).exp()

    def run(call: Any) -> list[Tensor | None]:
        x, z = square(), square()
        torch.manual_seed(0)
        one, other = call(x, z)
        one.sum().backward(retain_graph=True)
        one.sum().backward()
        other.sum().backward(retain_graph=True)
        other.sum().backward()
        return [x.grad, z.grad]

    found = run(lambda x, z: recompute.wrap_activation_checkpoint(body, x, z, recompute.keep))
    assert_bitwise(found, run(lambda x, z: body(x, z, _plainly)))


def test_only_backwards_after_one_that_retains_nothing_compute_again() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return recompute.keep(torch.mm, x, x).sin(), recompute.keep(torch.mm, x.detach(), x.detach()) * x

    x = square()
    first, second = recompute.wrap_activation_checkpoint(body, x)
    plain = calls_in_backward((x @ x).sin())["mm"]
    assert calls_in_backward(first)["mm"] == plain
    assert calls_in_backward(second)["mm"] == 2


def test_what_is_kept_is_freed_when_it_has_been_used() -> None:
    kept: list[StorageWeakRef] = []
    freed: list[list[bool]] = []

    def body(x: Tensor) -> Tensor:
        early = x.tanh()
        early.register_hook(lambda gradient: freed.append([ref.expired() for ref in kept]))
        product = recompute.keep(torch.mm, early, early)
        kept.append(StorageWeakRef(product.untyped_storage()))
        last = (product + 1).sin().mul(2)
        end = recompute.keep(torch.add, last, 1)
        kept.append(StorageWeakRef(end.untyped_storage()))
        return end * 2

    y = recompute.wrap_activation_checkpoint(body, square())
    loss = y.sum()
    del y
    assert [ref.expired() for ref in kept] == [False, False]
    loss.backward()
    # Nothing but the region has them, and its backward is not over yet where the hook is called.
    assert freed[0] == [True] * len(freed[0])


def test_a_part_that_raises_raises_again() -> None:
    def fails(x: Tensor) -> Tensor:
        x.sin()
        return torch.mm(x, x.flatten())

    def body(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="matrix"):
            recompute.keep(fails, x)
        return recompute.keep(torch.sin, x).cos()

    x = square()
    found = torch.autograd.grad(recompute.wrap_activation_checkpoint(body, x).sum(), x)
    assert_bitwise(found, torch.autograd.grad(x.sin().cos().sum(), x))
