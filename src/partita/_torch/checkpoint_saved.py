"""What a body is given, saved as autograd saves: whoever recomputes around it, or offloads, decides where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from partita._torch.schemas import version_of
from partita.errors import RecomputeError

__all__ = ["SavedInputs", "can_be_saved", "is_trained", "named_leaves"]


class SavedInputs:
    """The arguments of a body: as they are for its first run, and from what a checkpoint has saved for the second.

    Leaves that need gradients, such as weights, are alive anyway: they are the same tensors in both runs, as autocast
    wants it, which remembers what it has cast.
    """

    def __init__(self, operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        #: A body may write to containers, so that the first run gets those of the caller; then nobody holds them.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (operands, dict(keywords))
        leaves, self._structure = pytree.tree_flatten(self._first)
        self._others = [None if isinstance(leaf, Tensor) and not is_trained(leaf) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

    def named(self) -> dict[str, Tensor]:
        """The tensors by the names that messages have for them."""
        return {name: leaf for name, leaf in named_leaves(*self._given()) if isinstance(leaf, Tensor)}

    def tensors(self) -> list[Tensor]:
        """What the checkpoint saves, weights too: where a region around it runs again, they are copies of them."""
        return [leaf for leaf in pytree.tree_leaves(self._given()) if isinstance(leaf, Tensor)]

    def first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments themselves, once."""
        given, self._first = self._given(), None
        return given

    def again(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in them."""
        saved = iter(tensors)
        given = [next(saved) if is_tensor else None for is_tensor in self._is_tensor]
        leaves = [tensor if other is None else other for tensor, other in zip(given, self._others, strict=True)]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, self._structure)
        return found

    def saving(self) -> AbstractContextManager[Any]:
        """Around the checkpoint: a tensor that is written before it is needed again is told by its name.

        Where somebody else packs what is saved, he gives back what he was given, whatever happened to it since.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return nullcontext()
        names = {id(tensor): name for name, tensor in self.named().items()}
        return saved_tensors_hooks(lambda tensor: _noted(tensor, names.get(id(tensor), "an argument")), _unwritten)

    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._first is not None
        return self._first


def named_leaves(operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All leaves of arguments, in the order of their tree, with a name for each."""
    for given, value in (*enumerate(operands), *keywords.items()):
        leaves = pytree.tree_leaves(value)
        for place, leaf in enumerate(leaves):
            yield f"argument {given}" if len(leaves) == 1 else f"argument {given}, item {place}", leaf


def can_be_saved(leaf: Any) -> bool:
    """Whether autograd can save an argument: no inference tensor, nor a view that was written behind its back."""
    if not isinstance(leaf, Tensor):
        return True
    try:
        _ = leaf.grad_fn
    except RuntimeError:
        return False
    return not leaf.is_inference()


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that needs gradients."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # A view that may not be asked is no leaf.
        return False


def _noted(tensor: Tensor, name: str) -> tuple[Tensor, int, str]:
    return tensor, version_of(tensor), name


def _unwritten(noted: tuple[Tensor, int, str]) -> Tensor:
    """What was noted, as long as it is what it was."""
    tensor, version, name = noted
    if version_of(tensor) != version:
        raise RecomputeError(
            f"{name!r} changed in place between the region and its backward, so the region would be recomputed with "
            "other values; write to a copy, or leave what reads it out of the region"
        )
    return tensor
