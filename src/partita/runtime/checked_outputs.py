"""Checked outputs: what a compiled function gives, looked at once: a tuple or a list, with all outputs of the body."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from partita.errors import BackendError

__all__ = ["WrongOutputsError", "check_outputs"]


class WrongOutputsError(BackendError):
    """What a function gives that keeps no promise; whoever called it knows for which region, and says so."""


def check_outputs(outputs: Any, *, count: int | None, tensors: Iterable[int]) -> None:
    """Raises unless `outputs` are `count` values, where that is known, with tensors at the places `tensors`.

    A tensor in the place of the tuple would be taken apart along its first axis, and nobody would notice.
    """
    if not isinstance(outputs, tuple | list):
        raise WrongOutputsError(f"gives {_kind(outputs)} where a tuple or a list of outputs belongs")
    if count is not None and len(outputs) != count:
        raise WrongOutputsError(f"gives {_kind(outputs)} of length {len(outputs)} where one of length {count} belongs")
    for place in tensors:
        if not isinstance(outputs[place], Tensor):
            raise WrongOutputsError(f"gives {_kind(outputs[place])} for output {place}, which is a tensor")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
