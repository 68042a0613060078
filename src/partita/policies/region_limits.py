"""Limits on regions: connected ones, not too small, not too large, worthwhile."""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import OptionError
from partita.policies.worthwhile import Worthwhile

__all__ = ["RegionLimits"]


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What a region must be like."""

    connected: bool = False
    smallest: int = 1
    smallest_flops: int = 0
    largest: int | None = None
    worthwhile: Worthwhile | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.connected, bool):
            raise OptionError(f"connected is True or False, not {self.connected!r}")
        for name, least in (("smallest", 1), ("smallest_flops", 0), ("largest", 1)):
            value = getattr(self, name)
            if (type(value) is not int or value < least) and not (name == "largest" and value is None):
                raise OptionError(f"{name} is a number from {least} on, not {value!r}")
        if self.largest is not None and self.largest < self.smallest:
            raise OptionError(f"no region has at least {self.smallest} and at most {self.largest} operators")
        if self.worthwhile is not None and not callable(self.worthwhile):
            raise OptionError(f"`worthwhile` is a function of a region, not {self.worthwhile!r}")

    def allow_anything(self) -> bool:
        """Whether no region can be cut or left out."""
        return self.largest is None and self.worthwhile is None and self.smallest == 1 and not self.smallest_flops
