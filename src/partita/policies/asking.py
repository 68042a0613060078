"""Asking a user's function about a node, with an error that names the node when the function raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.fx import Node

from partita.errors import CallbackError

__all__ = ["asked"]

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")


def asked(function: Callable[[Subject], Answer], subject: Subject, *, node: Node, role: str) -> Answer:
    """What `function`, called `role` in the error, answers about `subject`."""
    try:
        return function(subject)
    except Exception as error:
        raise CallbackError(
            f"the {role} raised {type(error).__name__} for node {node.name!r}: {error}; nothing was changed"
        ) from error
