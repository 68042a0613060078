"""The functions by which a graph starts and ends a level of torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._functorch import predispatch

__all__ = ["ENDS_OF_LEVELS", "STARTS_OF_LEVELS"]


def _named(ending: str) -> frozenset[Callable[..., Any]]:
    places: Iterable[Any] = (torch._C._functorch, predispatch)
    return frozenset(getattr(place, name) for place in places for name in dir(place) if name.endswith(ending))


STARTS_OF_LEVELS = _named("_increment_nesting")
ENDS_OF_LEVELS = _named("_decrement_nesting")
