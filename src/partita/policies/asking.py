"""Asking a user's function about a node, with an error that names the node when the function raises."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.fx import Node

from partita.errors import CallbackError

__all__ = ["NO_REASON", "asked", "asked_label"]

#: What stands for a reason that is an empty text.
NO_REASON = "no reason given"

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


def asked_label(function: Callable[[Node], Hashable], node: Node, *, role: str) -> Hashable:
    """What `function` answers about `node`, by which nodes can be told apart."""
    label = asked(function, node, node=node, role=role)
    try:
        hash(label)
    except TypeError as error:
        raise CallbackError(
            f"the {role} answered {label!r} for node {node.name!r}, by which nodes cannot be told apart; it answers "
            "with a name, a number or a tuple of these"
        ) from error
    return label
