"""Trials of single calls on tensors without memory: what they compute, and when autograd saves something for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from partita._torch.dry_runs import Allowance
from partita._torch.saved_operators import OperatorWatch
from partita._torch.saved_setting import apart_from_the_caller, saving_into
from partita._torch.stage import map_tensors

__all__ = ["flops_of_call", "flops_until_saved"]


def flops_of_call(function: Any, args: Any, kwargs: Any) -> int:
    """The FLOPs of the operators that a call comes down to; raises what the call raises."""
    watch = OperatorWatch(_ignore, Allowance(_CALLS), makes_meta=True)
    with apart_from_the_caller(grad=False), watch:
        function(*args, **kwargs)
    return watch.flops


#: The most operators that a product may come down to.
_CALLS = 10_000


def flops_until_saved(op: str, target: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> int | None:
    """The FLOPs that are done when a call saves something for the last time; None if it saves nothing.

    Raises what the call raises. All tensors that can have gradients are taken to have them.
    """
    done: list[int] = []
    watch = OperatorWatch(_ignore, allowance, makes_meta=True)
    with apart_from_the_caller(grad=True), saving_into(lambda _: done.append(watch.flops)), watch:
        args, kwargs = map_tensors(_with_gradient, (args, kwargs))
        if op == "call_method":
            getattr(args[0], target)(*args[1:], **kwargs)
        else:
            target(*args, **kwargs)
    return done[-1] if done else None


def _with_gradient(tensor: Tensor) -> Tensor:
    """A tensor that has a history, since autograd lets nobody write to one that begins it."""
    can_have_one = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_().clone() if can_have_one else tensor


def _ignore(result: Any) -> None:
    """What an operator makes is of no interest here."""
