"""An argument of a body that nobody writes, until the body runs again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from partita._torch.checkpoint_state import condition_of
from partita._torch.storage_copies import wants_gradients
from partita._torch.versions import version_of
from partita.errors import RecomputeError

__all__ = ["GivenTensor", "is_trained"]


@final
class GivenTensor:
    """The values of an argument and whether it wants gradients, without its history; they are not copied."""

    __slots__ = ("_before", "_held", "_name", "_wants_gradients", "can_be_saved", "leaf")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._name = name
        self._wants_gradients = wants_gradients(tensor)
        self.can_be_saved = not tensor.is_inference()
        #: The argument itself, if it is a weight, say, which is alive anyway; autocast remembers what it cast of it.
        self.leaf = tensor if is_trained(tensor) else None
        self._held: Tensor | None = None
        if self.leaf is not None:
            self._before: object = condition_of(tensor)
        else:
            self._before = version_of(tensor)
            self._held = tensor.detach() if self.can_be_saved else tensor

    def hand_over(self) -> Tensor:
        """What somebody else is to save, and to give back; it is not held here any more."""
        held, self._held = self._held, None
        if held is None:
            assert self.leaf is not None
            return self.leaf.detach()
        return held

    def tensor(self, saved: Tensor | None) -> Tensor:
        """The argument once more, from what somebody else has saved of it, if anybody has.

        He gives back what he was given, whatever happened to it since; else it must be what it was.
        """
        if self.leaf is not None:
            if condition_of(self.leaf) == self._before:
                return self.leaf
            if saved is None:
                raise RecomputeError(
                    f"{self._name!r} changed in place between forward and backward, so the region that reads it would "
                    "be recomputed with other values; run backward before you update what it needs"
                )
        if saved is None:
            saved = self._unchanged()
        return _wanting_gradients(saved) if self._wants_gradients else saved

    def _unchanged(self) -> Tensor:
        assert self._held is not None
        if version_of(self._held) != self._before:
            raise RecomputeError(
                f"{self._name!r} changed in place between the region and its backward, so the region would be "
                "recomputed with other values; write to a copy, or leave what reads it out of the region"
            )
        return self._held if self._held.is_inference() else self._held.detach()


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that needs gradients."""
    return wants_gradients(tensor) and tensor.is_leaf


def _wanting_gradients(tensor: Tensor) -> Tensor:
    """The same values, for which gradients are wanted; no leaf, of which autocast would remember what it casts."""
    leaf = tensor.detach().requires_grad_()
    if leaf.layout is not torch.strided:
        return leaf
    with torch.enable_grad():
        alias: Tensor = torch.ops.aten.alias.default(leaf)
    return alias
