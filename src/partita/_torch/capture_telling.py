"""Methods that tell the recorder what they do while a model is traced, and do only their own work anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

from partita._torch.capture_recorder import listening_recorder
from partita._torch.capture_swaps import Swap

__all__ = ["Action", "told"]

#: Called with the recorder, the original method, and what the method was called with.
Action: TypeAlias = Callable[..., Any]


def told(owner: Any, name: str, action: Action) -> Swap:
    """The method `name` of a class, with `action` in its place in the thread that traces a model."""
    original = vars(owner)[name]

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        recorder = listening_recorder()
        if recorder is None:
            return original(*args, **kwargs)
        return action(recorder, original, *args, **kwargs)

    return Swap(owner, name, method)
