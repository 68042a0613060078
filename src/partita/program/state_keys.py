"""State keys: a two-way map between the state dict of a rewritten program and that of the original."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The original path of each moved module, one map per rewrite, the newest first."""

    rewrites: tuple[Mapping[str, str], ...] = ()

    def original(self, key: str) -> str:
        """The name that `key` of this program has in the original."""
        for moved in self.rewrites:
            key = _before(key, moved)
        return key

    def then(self, moved: Mapping[str, str]) -> StateKeys:
        """The keys after another rewrite, where `moved` maps each new path of a module to its former path."""
        return StateKeys((moved, *self.rewrites)) if moved else self

    def of_paths(self, paths: Iterable[str]) -> StateKeys:
        """The same keys for modules at these paths only, folded into one rewrite."""
        moved = {path: self.original(path) for path in paths}
        return StateKeys(({path: old for path, old in moved.items() if path != old},)) if self.rewrites else self

    def to_original(self, state: Mapping[str, T]) -> dict[str, T]:
        """A state dict of this program under the original names."""
        return {self.original(key): value for key, value in state.items()}

    def from_original(self, state: Mapping[str, T], keys: Iterable[str]) -> dict[str, T]:
        """A state dict of the original under the names of this program; entries that match none of `keys` are kept."""
        found = {key: state[self.original(key)] for key in keys if self.original(key) in state}
        used = {self.original(key) for key in found}
        return {**found, **{key: value for key, value in state.items() if key not in used}}


def _before(key: str, moved: Mapping[str, str]) -> str:
    path, rest = key, ""
    while path:
        if path in moved:
            return moved[path] + rest
        path, _, last = path.rpartition(".")
        rest = f".{last}{rest}"
    return key


#: The keys of a program that was not rewritten.
UNMOVED = StateKeys()
