"""Findings: what a comparison of two programs tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Comparison", "Difference"]


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same: of which kind, where, by how much, and in which of the calls."""

    kind: str
    where: str
    detail: str
    when: str = ""

    def __str__(self) -> str:
        when = f" ({self.when})" if self.when else ""
        return f"{self.kind} of {self.where}{when}: {self.detail}"


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences, what was left unchecked, and how many calls of each program were compared."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    calls: int = 0
    #: In how many of the calls the original itself raised, so that there were no results to compare.
    raised: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        count = len(self.differences)
        found = "nothing differs" if not count else f"{count} difference{'s' if count > 1 else ''}"
        lines = [f"{found} in {self.calls} call{'' if self.calls == 1 else 's'}"]
        lines += [f"  {difference}" for difference in self.differences]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
