"""The conditions on sizes that torch.export checks when a program is called, beside the ranges of its symbols."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["guards_of", "set_guards"]


def guards_of(exported: Any) -> tuple[str, ...]:
    """The conditions as source text; a torch that has none gives none."""
    return tuple(getattr(exported, "_guards_code", ()))


def set_guards(exported: Any, guards: Collection[str]) -> None:
    """Lets a program check these conditions: torch finds them in what was traced, but not in what was loaded."""
    if guards:
        exported._guards_code = list(guards)
