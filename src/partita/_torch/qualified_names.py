"""What torch's passes call a function when users name operators by text."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx.node import _get_qualified_name

__all__ = ["qualified_names"]


def qualified_names(function: Any) -> tuple[str, ...]:
    """The names by which a user may mean `function`: its own, and for an overload also that of all its overloads."""
    try:
        name = _get_qualified_name(function)
    except (RuntimeError, AttributeError, TypeError):  # A lambda, or an object that is called, may have none.
        return ()
    return (name, name.rpartition(".")[0]) if isinstance(function, OpOverload) else (name,)
