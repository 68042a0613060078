"""Open sizes: which sizes and integers of a call a compiler gets as symbols, so that one function serves them all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import nn

from partita.runtime.signature import Call, Constant, Signature, TensorLook

__all__ = ["OpenSizes", "Place", "TracedSymbols"]

#: A size by input and axis; the axis of an integer is None.
Place: TypeAlias = tuple[int, int | None]

#: For each input of a body the symbols of its sizes, or its own symbol, by name, as its tracer had them; else None.
TracedSymbols: TypeAlias = tuple[tuple[str | None, ...] | str | None, ...]


@final
@dataclass(frozen=True, slots=True)
class OpenSizes:
    """What is open: what was traced as a symbol, and what has been seen to change, unless `dynamic` says otherwise."""

    traced: TracedSymbols = ()
    dynamic: bool | None = None
    changed: frozenset[Place] = frozenset()

    def of(self, signature: Signature, call: Call) -> dict[Place, Hashable]:
        """The key of the symbol for each open size of a call; two sizes that were traced as one symbol share it.

        Parameters and the state of modules have no open sizes.
        """
        if self.dynamic is False:
            return {}
        count = call.input_count
        found: dict[Place, Hashable] = {}
        known: dict[str, int] = {}
        for place, size in _sizes(signature, call.values[:count]):
            symbol = self._symbol(place) if count == len(self.traced) else None
            if symbol is not None:
                # Whoever calls the program with sizes that its trace would have refused gets a symbol for each.
                found[place] = symbol if known.setdefault(symbol, size) == size else place
            elif self.dynamic or place in self.changed:
                found[place] = place
        return found

    def after(self, one: Signature, other: Signature) -> OpenSizes:
        """What is open once calls of these two signatures, which are of one kind, have been seen."""
        places = {
            (place, axis)
            for place, (look, now) in enumerate(zip(one.looks, other.looks, strict=True))
            for axis in _differing(look, now)
        }
        return OpenSizes(self.traced, self.dynamic, self.changed | places)

    def _symbol(self, place: Place) -> str | None:
        number, axis = place
        traced = self.traced[number]
        if axis is None:
            return traced if isinstance(traced, str) else None
        return traced[axis] if isinstance(traced, tuple) and axis < len(traced) else None


def _sizes(signature: Signature, values: Sequence[object]) -> list[tuple[Place, int]]:
    """All sizes of these values, then all integers among them: a symbol for both is a size."""
    sizes: list[tuple[Place, int]] = [
        ((number, axis), size)
        for number, (look, value) in enumerate(zip(signature.looks, values, strict=False))
        if isinstance(look, TensorLook) and not isinstance(value, nn.Parameter)
        for axis, size in enumerate(look.sizes)
    ]
    for number, value in enumerate(values):
        if type(value) is int:
            sizes.append(((number, None), value))
    return sizes


def _differing(one: TensorLook | Constant, other: TensorLook | Constant) -> list[int | None]:
    if isinstance(one, TensorLook) and isinstance(other, TensorLook):
        return [axis for axis, (old, new) in enumerate(zip(one.sizes, other.sizes, strict=True)) if old != new]
    return [None] if one != other else []
