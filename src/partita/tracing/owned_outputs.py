"""Owned outputs: tensors that a piece makes itself stay apart from its inputs, whatever its compiler does.

Inductor (torch 2.13) returns `x` itself for `torch.zeros(4) + x`. In one graph that shows only at the end; between two
pieces, a write to one of them would change the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from partita._torch.schemas import storage_key
from partita._torch.versions import version_of

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
        holders = Counter(map(_memory, (*self.args, *self.outputs)))
        return tuple(
            place
            for place, value in enumerate(self.outputs)
            if isinstance(value, Tensor) and holders[_memory(value)] == 1
        )


@final
class OwnedOutputs(nn.Module):
    """Calls a compiled piece and copies each owned output that turns out to share memory."""

    def __init__(self, compiled: Callable[..., Sequence[Any]], owned: tuple[int, ...]) -> None:
        super().__init__()
        self._compiled = compiled
        self._owned = owned

    def forward(self, *args: Any) -> Sequence[Any]:
        outputs = list(self._compiled(*args))
        holders = Counter(map(_memory, (*args, *outputs)))
        for place in self._owned:
            if holders[_memory(outputs[place])] > 1:
                outputs[place] = outputs[place].clone()
        return outputs


def _memory(value: Any) -> object:
    """What two values have in common if they share memory."""
    return storage_key(value) if isinstance(value, Tensor) else object()


def _versions(values: Iterable[Any]) -> tuple[int | None, ...]:
    return tuple(version_of(value) if isinstance(value, Tensor) else None for value in values)
