"""Aliasing: with which input, state or earlier output each output shares its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from partita.equivalence.storages import storage_key

__all__ = ["Home", "homes_of"]


@dataclass(frozen=True, slots=True)
class Home:
    """The first named tensor in the same memory, and how many elements further on this one starts."""

    name: str
    offset: int

    def __str__(self) -> str:
        return f"shares memory with {self.name}" + (f" from element {self.offset} on" if self.offset else "")


def homes_of(
    outputs: Iterable[tuple[str, Tensor]], around: Iterable[tuple[str, Tensor]]
) -> tuple[tuple[str, Home | None], ...]:
    """The home of each output among the tensors `around` the call and the outputs before it; None for new memory."""
    known: dict[int, tuple[str, int]] = {}
    for name, tensor in around:
        key = storage_key(tensor)
        if key is not None:
            known.setdefault(key, (name, int(tensor.storage_offset())))
    homes: list[tuple[str, Home | None]] = []
    for name, tensor in outputs:
        key = storage_key(tensor)
        if key is None or key not in known:
            homes.append((name, None))
        else:
            owner, start = known[key]
            homes.append((name, Home(owner, int(tensor.storage_offset()) - start)))
        if key is not None:
            known.setdefault(key, (name, int(tensor.storage_offset())))
    return tuple(homes)
