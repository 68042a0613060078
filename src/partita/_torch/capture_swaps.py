"""Attributes of torch that hold something else for a while: set one by one, put back in reverse order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Swap", "swapped"]

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Swap:
    """What an attribute of a module or class is to hold."""

    owner: Any
    name: str
    value: Any


@contextmanager
def swapped(swaps: Iterable[Swap]) -> Iterator[None]:
    """Inside, the attributes hold the new values; afterwards, whatever happened, those that they held before."""
    found: list[Swap] = []
    try:
        for swap in swaps:
            # A class may have inherited the attribute, and a classmethod must be put back as one.
            found.append(Swap(swap.owner, swap.name, vars(swap.owner).get(swap.name, _ABSENT)))
            setattr(swap.owner, swap.name, swap.value)
        yield
    finally:
        for swap in reversed(found):
            if swap.value is _ABSENT:
                delattr(swap.owner, swap.name)
            else:
                setattr(swap.owner, swap.name, swap.value)
