"""What the tests of recomputation share: both checkpoints, a block that draws, and training steps to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita import recompute

OPERATORS = {"wrap": recompute.wrap_activation_checkpoint, "tag": recompute.tag_activation_checkpoint}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


class Block(nn.Module):
    """Two products with a dropout between them."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(functional.dropout(functional.gelu(self.up(x)), 0.5, self.training)) * scale


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def square(size: int = 4) -> Tensor:
    """A matrix that requires gradients, the same each time."""
    return torch.linspace(-1, 1, size * size).reshape(size, size).requires_grad_()


def step(function: Callable[..., Any], leaves: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """What a call gives, the gradients of its sum, and what is drawn next: all that a training step can tell."""
    torch.manual_seed(3)
    given = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
    loss = torch.stack([leaf.float().square().sum() for leaf in given if leaf.requires_grad]).sum()
    return [*given, *torch.autograd.grad(loss, leaves, allow_unused=True), torch.rand(2)]


def assert_bitwise(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Tensors bit by bit, and None for None."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def calls_in_backward(result: Tensor) -> Counter[str]:
    """The operators that the backward of a result runs, those of a recomputation among them."""
    with Counted() as counted:
        result.sum().backward()
    return counted.calls
