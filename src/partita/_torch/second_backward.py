"""Backwards of functions that AOTAutograd compiled, while autograd records them: what they return has no backward.

With `create_graph=True` torch (2.13) fails to copy a gradient that is not laid out as the compiled code expects, and
where the recorded backward is run, its error names no way out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from partita.errors import BackendError

#: Dynamo does not trace this module: backwards run around compiled code.
DYNAMO_SKIPS = True


def refuse_second_backward(outputs: Iterable[Any]) -> None:
    """Makes the autograd function that has computed these outputs, if AOTAutograd made it, refuse in our words."""
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad and (function := _compiled_function(output)) is not None:
            refuse_backward_of(function)


def refuse_backward_of(function: Any) -> None:
    """Makes an autograd function of AOTAutograd refuse a backward of its backward in our words; done once."""
    inherited = function.backward
    if getattr(inherited, "refuses_second_backward", False):
        return
    is_boxed = getattr(function, "boxed_grads_call", False)

    def backward(ctx: Any, *received: Any) -> Any:
        if not torch.is_grad_enabled():
            return inherited(ctx, *received)
        given = list(received[0] if is_boxed else received)
        # One that is laid out otherwise is copied into a leaf, which torch refuses for a gradient with a history.
        plain = [one.detach() if isinstance(one, Tensor) else one for one in given]
        computed = inherited(ctx, plain) if is_boxed else inherited(ctx, *plain)
        return _recorded(computed, given)

    backward.refuses_second_backward = True  # type: ignore[attr-defined]
    function.backward = staticmethod(backward)


def _recorded(computed: Iterable[Any], given: Iterable[Any]) -> tuple[Any, ...]:
    """The gradients, with a history if what they are computed of has one; its backward raises."""
    found = list(computed)
    for one in found:
        if isinstance(one, Tensor) and one.grad_fn is not None:
            one.grad_fn.register_prehook(_refuse)
    without = [place for place, one in enumerate(found) if _is_differentiable(one) and not one.requires_grad]
    # torch 2.13 gives each a history; one without would seem to be a constant to a backward of this backward.
    behind = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
    if without and behind:
        apply: Any = _Once.apply
        for place, one in zip(without, apply([found[place] for place in without], *behind), strict=True):
            found[place] = one
    return tuple(found)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _refuse(gradients: Any) -> None:
    raise BackendError(
        "a backward was recorded (create_graph=True) and is run backwards, through a compiled region: what AOTAutograd "
        "compiles has no double backward. Run that region eagerly: leave it out of the partition, or treat it with "
        "Call() or Lower('eager'). Inside torch.compile, torch._dynamo.config.trace_autograd_ops = True puts a "
        "torch.autograd.grad of the model itself into the graph, which is then compiled with its backward"
    )


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *behind: Tensor) -> tuple[Tensor, ...]:
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _refuse(gradients)


def _compiled_function(output: Tensor) -> Any:
    """The autograd function of AOTAutograd that made an output, also where that is a view which was made anew."""
    try:
        node: Any = output.grad_fn
    except RuntimeError:  # Autograd refuses to return the `grad_fn` of some views.
        return None
    for _ in range(_VIEWS):
        if node is None or isinstance(node, BackwardCFunction):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    function = getattr(node, "_forward_cls", None)
    return function if hasattr(function, "compiled_fw") else None


#: How many views torch replays, at most, around the result of a compiled function.
_VIEWS = 4
