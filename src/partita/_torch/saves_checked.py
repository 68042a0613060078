"""What autograd saves of a body that writes: refused where it is needed and was written since, as plain autograd does.

A checkpoint keeps what the second run saves without looking. It is told apart by its order, the same in both runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from partita._torch.checkpoint_facts import BodyFacts
from partita._torch.saving_hooks import around_hooks
from partita._torch.versions import version_of
from partita.errors import RecomputeError

__all__ = ["SavesInOrder"]


class SavesInOrder:
    """How often each tensor that a body saves had been written when the second run saved it."""

    def __init__(self, facts: BodyFacts | None) -> None:
        self._facts = facts
        self._count = 0
        self._versions: list[int | None] = []

    def first(self) -> AbstractContextManager[Any]:
        """While the body runs for the first time."""
        return around_hooks(self._number, self._checked)

    def again(self) -> AbstractContextManager[Any]:
        """While it runs again."""
        self._versions = []
        return around_hooks(self._note)

    def _number(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> tuple[int, Any]:
        self._count += 1
        return self._count - 1, pack(tensor)

    def _note(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        self._versions.append(version_of(tensor))
        return pack(tensor)

    def _checked(self, unpack: Callable[[Any], Tensor], numbered: tuple[int, Any]) -> Tensor:
        place, packed = numbered
        tensor = unpack(packed)  # The first of these runs the body again.
        if self._versions[place : place + 1] in ([], [version_of(tensor)]):
            return tensor
        who = "the body" if self._facts is None else f"one of the nodes {', '.join(self._facts.writers[:5])}"
        raise RecomputeError(
            f"{who} writes to a tensor that the backward needs as it was; plain autograd refuses that too"
        )
