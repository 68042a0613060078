"""A model and the program captured from it, run side by side under the modes of several callers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita import Program
from partita._torch.modes import read_ambient, restore_autocast
from partita.capture.capture import capture

Modes = Callable[[], AbstractContextManager[Any]]

CALLERS: Mapping[str, Modes] = {
    "as it comes": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


class Model(nn.Module):
    """Two linear layers, a buffer, and a function that says what to do with them."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.does = does

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.does(self, x, **kwargs)


@dataclass
class Outcome:
    """All that can be observed of one call and its backward."""

    outputs: list[Any]
    requires_grad: list[bool]
    is_inference: list[bool]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    def equals(self, other: Outcome) -> bool:
        return (
            len(self.outputs) == len(other.outputs)
            and all(map(same, self.outputs, other.outputs))
            and self.requires_grad == other.requires_grad
            and self.is_inference == other.is_inference
            and all_same(self.gradients, other.gradients)
            and all_same(self.buffers, other.buffers)
        )


def outcome(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, caller: Modes = nullcontext
) -> Outcome:
    """Calls a module under the modes of `caller`, and goes back from what it returns if that has gradients."""
    given = tuple(_own_leaf(value) for value in args)
    module.zero_grad()
    found = read_ambient()
    torch.manual_seed(1)
    with caller():
        returned = tree_leaves(module(*given, **dict(kwargs or {})))
    # What a model leaves switched is for its caller to put back.
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)
    tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
    losses = [leaf.float().square().sum() for leaf in tensors if leaf.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    gradients: dict[str, Tensor | None] = {name: parameter.grad for name, parameter in module.named_parameters()}
    gradients |= {f"argument {at}": value.grad for at, value in enumerate(given) if isinstance(value, Tensor)}
    return Outcome(
        returned,
        [leaf.requires_grad for leaf in tensors],
        [leaf.is_inference() for leaf in tensors],
        gradients,
        {name: buffer.clone() for name, buffer in module.named_buffers()},
    )


def captured(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Program:
    """The program of a copy of `model`, which has state of its own; capturing changes neither state nor modes."""
    own, found = copy.deepcopy(model), read_ambient()
    state = copy.deepcopy(own.state_dict())
    program = capture(own, args, kwargs)
    assert read_ambient() == found
    assert all_same(state, own.state_dict())
    return program


def assert_like_eager(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    callers: Mapping[str, Modes] = CALLERS,
) -> Program:
    """Values, dtypes, gradients and buffers are those of the model, bit by bit, whoever calls."""
    program = captured(model, args, kwargs)
    for name, caller in callers.items():
        expected = outcome(copy.deepcopy(model), args, kwargs, caller=caller)
        found = outcome(copy.deepcopy(program.module()), args, kwargs, caller=caller)
        assert expected.equals(found), f"called under {name}:\n{expected}\n{found}\n{program.graph}"
    return program


def same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    return first.dtype is second.dtype and first.shape == second.shape and torch.equal(first, second)


def all_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return {*first} == {*second} and all(same(value, second[name]) for name, value in first.items())


def _own_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())
