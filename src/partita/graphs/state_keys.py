"""State keys: a two-way map between the state dict of a rewritten program and that of the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

__all__ = ["UNMOVED", "StateKeys"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateKeys:
    """Which module of a program was which module of the original; modules that did not move are not mentioned."""

    moved: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def original(self, key: str) -> str:
        """The name in the original of what this program calls `key`."""
        path, rest = key, ""
        while path:
            if path in self.moved:
                return self.moved[path] + rest
            path, _, last = path.rpartition(".")
            rest = f".{last}{rest}"
        return key

    def then(self, moved: Mapping[str, str]) -> StateKeys:
        """The keys after another rewrite has moved modules from where this one left them."""
        return StateKeys({**self.moved, **{new: self.original(old) for new, old in moved.items()}})

    def to_original(self, state: Mapping[str, T]) -> dict[str, T]:
        """A state dict of this program under the original's names."""
        return {self.original(key): value for key, value in state.items()}

    def from_original(self, state: Mapping[str, T], keys: Mapping[str, object]) -> dict[str, T]:
        """A state dict of the original under this program's names, for each of `keys` that it has."""
        found = {key: state[self.original(key)] for key in keys if self.original(key) in state}
        used = {self.original(key) for key in found}
        return {**found, **{key: value for key, value in state.items() if key not in used}}


#: The keys of a program that was made from no other.
UNMOVED = StateKeys()
