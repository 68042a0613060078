"""What a check of a backend found: the laws that are broken, where, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["BackendReport", "BrokenLaw"]


@final
@dataclass(frozen=True, slots=True)
class BrokenLaw:
    """One law that does not hold, the body or program that shows it, and how."""

    law: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.law}\n    {self.where}: {self.detail}"


@final
@dataclass(frozen=True, slots=True)
class BackendReport:
    """How many checks were made, what is broken, and notes about what was left out."""

    backend: str
    checks: int
    broken: tuple[BrokenLaw, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def __str__(self) -> str:
        laws = list(dict.fromkeys(broken.law for broken in self.broken))
        found = f"{len(laws)} laws broken" if len(laws) > 1 else "1 law broken" if laws else "all laws hold"
        lines = [f"{self.backend}: {found} in {self.checks} checks"]
        lines += [f"  {broken}" for broken in self.broken]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
