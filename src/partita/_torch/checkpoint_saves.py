"""What autograd saves of a body that writes: refused where it is needed and was written since, as plain autograd does.

A checkpoint keeps what the second run saves without looking. It is told apart by its order, the same in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita._torch.checkpoint_facts import BodyFacts
from partita._torch.schemas import version_of
from partita.errors import RecomputeError

__all__ = ["SavesInOrder"]


class SavesInOrder:
    """How often each tensor that a body saves had been written when the second run saved it."""

    def __init__(self, facts: BodyFacts | None) -> None:
        self._facts = facts
        self._count = 0
        self._versions: list[int] = []

    def first(self) -> AbstractContextManager[Any]:
        """While the body runs for the first time."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return nullcontext() if hooks is None else saved_tensors_hooks(*self._numbering(*hooks))

    @contextmanager
    def second(self) -> Iterator[None]:
        """While it runs again."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            yield
            return
        pack, unpack = hooks
        self._versions = []

        def note(tensor: Tensor) -> Any:
            self._versions.append(version_of(tensor))
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
            yield

    def _numbering(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        def number(tensor: Tensor) -> tuple[int, Any]:
            self._count += 1
            return self._count - 1, pack(tensor)

        def checked(numbered: tuple[int, Any]) -> Tensor:
            place, packed = numbered
            tensor = unpack(packed)  # The first of these runs the body again.
            self._check(tensor, place)
            return tensor

        return number, checked

    def _check(self, tensor: Tensor, place: int) -> None:
        if self._versions[place : place + 1] in ([], [version_of(tensor)]):
            return
        who = "the body" if self._facts is None else f"one of the nodes {', '.join(self._facts.writers[:5])}"
        raise RecomputeError(
            f"{who} writes to a tensor that the backward needs as it was; plain autograd refuses that too"
        )
