"""Python functions that no analysis knows: to a partitioner each is a black box."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "branches",
    "bump",
    "clip_gradient",
    "halve",
    "halve_gradient",
    "jitter",
    "note",
    "peel",
    "replace_first",
]


def halve(x: Tensor) -> Tensor:
    """A new tensor; the function is pure."""
    return torch.tanh(x) * 0.5


def bump(x: Tensor) -> Tensor:
    """The argument itself, written to, which the name does not say."""
    return x.add_(0.125)


def note(x: Tensor) -> None:
    """Nothing, but the argument is written to."""
    x.mul_(0.75)


def jitter(x: Tensor) -> Tensor:
    """The argument plus noise from the global generator."""
    return x + 0.125 * torch.rand_like(x)


def peel(x: Tensor) -> Tensor:
    """A view of the argument."""
    return x.view(x.shape)[..., :2]


def halve_gradient(x: Tensor) -> None:
    """Nothing, but a hook on the argument halves its gradient. Leaves are left alone: hooks would stay on them."""
    if x.requires_grad and not x.is_leaf:
        x.register_hook(_halved)


def clip_gradient(x: Tensor) -> Tensor:
    """The argument itself, with a hook that clips its gradient."""
    if x.requires_grad and not x.is_leaf:
        x.register_hook(_clipped)
    return x


def _halved(gradient: Tensor | None) -> Tensor | None:
    # Autograd calls hooks with None as well, where a function with several inputs has no gradient for one of them.
    return None if gradient is None else gradient * 0.5


def _clipped(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clamp(-0.25, 0.25)


def branches(x: Tensor) -> dict[str, object]:
    """Containers in containers."""
    return {"whole": x.sin(), "parts": [x.cos(), (x * 0.5, x.neg())]}


def replace_first(pieces: list[Tensor], x: Tensor) -> None:
    """Nothing, but the first item of the list is another one."""
    pieces[0] = x
