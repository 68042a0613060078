"""Rows of the table: what was measured, beside what, and whether that meets a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Row", "Target", "at_least", "at_most"]


@dataclass(frozen=True, slots=True)
class Target:
    """Bounds for a value, both inclusive."""

    least: float = -math.inf
    most: float = math.inf

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least > -math.inf else f"<= {self.most:g}"


def at_least(bound: float) -> Target:
    return Target(least=bound)


def at_most(bound: float) -> Target:
    return Target(most=bound)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: ours and another in one unit, and the value that a target is about."""

    section: str
    case: str
    unit: str
    ours: float
    #: What `other` measures, and its value.
    beside: str = ""
    other: float | None = None
    #: How the value follows from the two, and the value.
    reading: str = ""
    value: float | None = None
    target: Target | None = None

    @property
    def verdict(self) -> str:
        if self.target is None or self.value is None:
            return ""
        return "ok" if self.target.holds(self.value) else "MISSED"
