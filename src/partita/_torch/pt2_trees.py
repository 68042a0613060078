"""Container types that a saved program names as text."""

from __future__ import annotations

from torch.utils import _pytree as pytree

__all__ = ["is_registered_container"]


def is_registered_container(name: str) -> bool:
    """Whether a container type is registered under this name, so that torch can make one."""
    return name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
