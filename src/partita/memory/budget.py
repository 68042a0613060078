"""Memory budgets: what a user says, in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

import torch

from partita._html import html_facts
from partita.errors import BudgetError, OptionError

#: Powers of 1000, as device makers and `nvidia-smi` users write them, and of 1024 with an "i".
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*(-?[0-9][0-9_]*(?:\.[0-9]*)?|-?\.[0-9]+)\s*([A-Za-z]*)\s*")


@final
@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How many bytes a training step may take at its peak.

    `peak` is a text such as "11GB" or "900 MiB", a number of bytes, or a part of the peak of the plain step, such as
    0.6. Everything counts that is allocated then: parameters, buffers, arguments, gradients, what is saved for
    backward, temporaries, and the state of the optimizer where it is given.
    """

    peak: str | int | float

    def __post_init__(self) -> None:
        if isinstance(self.peak, float) and 0 < self.peak <= 1:
            return
        self._checked(self.bytes(0))

    @property
    def is_relative(self) -> bool:
        """Whether it is a part of the peak of the plain step."""
        return isinstance(self.peak, float) and self.peak <= 1

    def bytes(self, plain_peak: int) -> int:
        """The budget in bytes, for a step whose plain peak is this."""
        if isinstance(self.peak, bool) or not isinstance(self.peak, str | int | float):
            raise OptionError(
                f"a peak is a text such as '11GB', a number of bytes or a part such as 0.6, not {self.peak!r}"
            )
        if isinstance(self.peak, str):
            return _read(self.peak)
        if isinstance(self.peak, float) and 0 < self.peak <= 1:
            return int(self.peak * plain_peak)
        if isinstance(self.peak, float) and 1 < self.peak < 1000:
            raise OptionError(
                f"a peak of {self.peak!r} is neither a part of the plain step, from 0 to 1, nor a likely number of "
                f"bytes; write '{self.peak:g}GB' or 0.6"
            )
        if self.peak != self.peak or self.peak in (float("inf"), float("-inf")):
            raise OptionError(f"a peak of {self.peak!r} is no number of bytes")
        return _counted(self.peak)

    def _checked(self, found: int) -> None:
        if found <= 0:
            raise BudgetError(
                f"a step cannot take {self.peak!r} bytes at its peak; a budget is above zero, such as '11GB' or 0.6 "
                "for 60 % of what the plain step takes"
            )

    def __str__(self) -> str:
        return (
            f"{self.peak:.0%} of the plain peak" if isinstance(self.peak, float) and self.peak <= 1 else str(self.peak)
        )

    def _repr_html_(self) -> str:
        return html_facts({"memory budget": self})


def _read(text: str) -> int:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise OptionError(
            f"{text!r} is no number of bytes; write it as '11GB', '900 MiB' or 11_000_000_000, or as a part of what "
            "the plain step takes: the number 0.6"
        )
    number, unit = found[1], found[2].lower()
    if unit not in _UNITS:
        raise OptionError(
            f"{found[2]!r} in {text!r} is no unit of bytes; there are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, "
            "GiB, TiB (powers of 1024)"
        )
    return _counted(float(number.replace("_", "")) * _UNITS[unit])


#: More bytes than any device has.
_MOST_BYTES = 2**63


def _counted(number: float) -> int:
    if number >= _MOST_BYTES:
        raise OptionError("a number of bytes of 2**63 or more is said, which no device has; write it as '11GB'")
    return int(number)


def bytes_said(value: object, name: str) -> int:
    """A number of bytes, or a text such as "200MB", that is zero or more; `name` is what it is for."""
    number = _read(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise OptionError(f"`{name}` is a number of bytes from 0 on, or a text such as '200MB', not {value!r}")
    return _counted(number)


def check_device_has(budget: int, device: torch.device) -> None:
    """Raises where a device has fewer bytes than a budget allows."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise BudgetError(
            f"the budget of {shown_bytes(budget)} is more than {device} has, {shown_bytes(total)}; ask for less, and "
            "leave room for what other programs and the caches of libraries take"
        )


def shown_bytes(number: int) -> str:
    """Bytes for people, in powers of 1000."""
    size = abs(number)
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{number / factor:.3f} {unit}"
    return f"{number} B"
