"""Owned outputs of pieces: which tensors a piece makes itself, found on fakes, and copied where its compiler shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from partita._torch.versions import version_of
from partita.runtime.owned_outputs import owned_places, places_to_copy

__all__ = ["OwnedOutputs", "PieceCall"]


@final
@dataclass(frozen=True, slots=True)
class PieceCall:
    """The fake arguments and outputs of one piece, with how often each tensor was written when the piece was done."""

    name: str
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    versions: tuple[int | None, ...]

    @classmethod
    def of(cls, name: str, args: Iterable[Any], outputs: Iterable[Any]) -> PieceCall:
        args, outputs = tuple(args), tuple(outputs)
        return cls(name, args, outputs, _versions((*args, *outputs)))

    def was_written_since(self) -> bool:
        """Whether what came later writes to a tensor that crossed the border here."""
        return _versions((*self.args, *self.outputs)) != self.versions

    def owned(self) -> tuple[int, ...]:
        """The places of outputs that share memory with no argument and no other output."""
        return owned_places(self.args, self.outputs)


@final
class OwnedOutputs(nn.Module):
    """Calls a compiled piece and copies each owned output that turns out to share memory."""

    def __init__(self, compiled: Callable[..., Sequence[Any]], owned: tuple[int, ...]) -> None:
        super().__init__()
        self._compiled = compiled
        self._owned = owned

    def forward(self, *args: Any) -> Sequence[Any]:
        outputs = list(self._compiled(*args))
        for place in places_to_copy(args, outputs, self._owned):
            outputs[place] = outputs[place].clone()
        return outputs


def _versions(values: Iterable[Any]) -> tuple[int | None, ...]:
    return tuple(version_of(value) if isinstance(value, Tensor) else None for value in values)
