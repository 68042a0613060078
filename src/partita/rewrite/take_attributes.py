"""Taking an attribute over: what a body names is put on the module that its nodes move to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partita.graphs.attributes import find
from partita.rewrite.state import place

__all__ = ["take_attribute"]


def take_attribute(root: nn.Module, body: nn.Module, target: str, value: Any) -> str:
    """The path at which `root` holds what `body` has at `target`.

    That is the same path where it is free, or holds this very object already; else torch's `submod_1` and so on.
    """
    if value is not None and find(root, target) is value:
        return target
    path, number = target, 0
    while hasattr(root, path.partition(".")[0]):
        number += 1
        path = f"submod_{number}"
    folder, _, name = target.rpartition(".")
    owner = find(body, folder) if folder else body
    is_buffer = isinstance(owner, nn.Module) and name in owner._buffers
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_buffer:
        _place_plainly(root, path, value)
    else:
        place(root, path, value, persistent=is_buffer and name not in owner._non_persistent_buffers_set)
    return path


def _place_plainly(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Puts a tensor that is no state, a constant of the graph say, where it stays none."""
    place(root, path, None)
    folder, _, name = path.rpartition(".")
    holder = find(root, folder) if folder else root
    holder.__dict__[name] = tensor
