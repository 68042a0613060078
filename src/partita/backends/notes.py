"""Notes: which outputs of a body turn out to be plain values or numbers while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from partita.backends.calling import Constant, Number, Output, Result

__all__ = ["Notes"]


@final
class Notes:
    """What was seen of outputs; `as_tensors` tells that the compiler makes tensors of numbers."""

    def __init__(self, *, as_tensors: bool) -> None:
        self._as_tensors = as_tensors
        self._constants: dict[int, Constant] = {}
        self._kinds: dict[int, type[int] | type[float] | type[bool]] = {}

    def noting(self) -> Callable[[Any, int], Any]:
        """A function for graphs: it notes what it is given for an output, and gives on all but plain values."""

        def note(value: Any, place: int) -> Any:
            if isinstance(value, Tensor):
                return value
            for symbolic, kind in _KINDS:
                if isinstance(value, symbolic):
                    self._kinds[place] = kind
                    return value
            self._constants[place] = Constant(value)
            return None

        return note

    def known(self, output: Output) -> Output:
        """How to read an output, after all that was seen."""
        if not isinstance(output, Result):
            return output
        kind = self._kinds.get(output.place)
        if kind is not None and self._as_tensors:
            return Number(output.place, kind)
        return self._constants.get(output.place, output)


_KINDS: tuple[tuple[type, type[int] | type[float] | type[bool]], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)
