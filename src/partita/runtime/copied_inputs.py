"""Copied inputs: compiled code gets copies of what somebody writes to before the backward pass, which may want it.

Inductor (torch 2.13) recomputes, so it keeps an input where plain torch keeps what was computed of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from partita.runtime.owned_outputs import memory_of

__all__ = ["places_of_copies"]


def places_of_copies(inputs: Mapping[str, Any], outputs: Iterable[Any], written_later: Collection[str]) -> list[int]:
    """The places of the inputs, by name, that are written later and that a copy can stand for.

    It cannot where compiled code gives a view of the input, nor where elements of the input share memory.
    """
    shown = set(map(memory_of, outputs))
    return [
        place
        for place, (name, value) in enumerate(inputs.items())
        if name in written_later and isinstance(value, Tensor) and memory_of(value) not in shown and _is_apart(value)
    ]


def _is_apart(value: Tensor) -> bool:
    """Whether no two elements of a tensor share memory."""
    reached = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True), key=lambda axis: axis[0]):
        if size > 1:
            if stride <= reached:
                return False
            reached += stride * (size - 1)
    return True
