"""Pairing: which tensor of one program's state stands for which tensor of the other's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from partita.equivalence.state import Slot
from partita.equivalence.storages import storage_key

__all__ = ["Pairing", "paired"]


@dataclass(frozen=True, slots=True)
class Pairing:
    """For each tensor of the original the place where the other program holds it, under the original's name."""

    before: tuple[Slot, ...]
    after: tuple[Slot, ...]
    notes: tuple[str, ...]


def paired(before: Sequence[Slot], after: Sequence[Slot]) -> Pairing:
    """Pairs by identity, then by memory, then by name; a program that shares nothing may be paired by position.

    A tensor that the other program does not hold stands for itself: no call of that program changes it.
    """
    found = _by_identity(before, after)
    copies = _by_name(before, after, taken=found)
    if not found and not copies:
        copies = _by_position(before, after)
    places = tuple(found.get(place) or copies.get(place) or slot for place, slot in enumerate(before))
    return Pairing(tuple(before), places, _notes(before, after, copies))


def _by_identity(before: Sequence[Slot], after: Sequence[Slot]) -> dict[int, Slot]:
    objects = {id(slot.tensor): slot for slot in reversed(after)}
    places = {_place(slot.tensor): slot for slot in reversed(after)}
    found = {n: objects.get(id(slot.tensor)) or places.get(_place(slot.tensor)) for n, slot in enumerate(before)}
    return {number: slot for number, slot in found.items() if slot is not None}


def _by_name(before: Sequence[Slot], after: Sequence[Slot], *, taken: dict[int, Slot]) -> dict[int, Slot]:
    shared = {id(slot.tensor) for slot in taken.values()}
    named = {slot.name: slot for slot in after if id(slot.tensor) not in shared}
    return {
        number: named[slot.name]
        for number, slot in enumerate(before)
        if number not in taken and slot.name in named and _alike(slot, named[slot.name])
    }


def _by_position(before: Sequence[Slot], after: Sequence[Slot]) -> dict[int, Slot]:
    if len(before) != len(after) or not all(map(_alike, before, after)):
        return {}
    return dict(enumerate(after))


def _place(tensor: Tensor) -> tuple[object, ...]:
    return storage_key(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _alike(one: Slot, other: Slot) -> bool:
    return one.tensor.shape == other.tensor.shape and one.tensor.dtype == other.tensor.dtype


def _notes(before: Sequence[Slot], after: Sequence[Slot], copies: dict[int, Slot]) -> tuple[str, ...]:
    if not copies:
        return ()
    number, other = next(iter(copies.items()))
    how = "name" if before[number].name == other.name else "position"
    return (
        f"{len(copies)} of {len(before)} state tensors are not shared but copies, paired by {how} "
        f"(the first is {before[number].label})",
    )
