"""Failures: compilations that went wrong, kept where a user can look after the program has run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import final

from partita.errors import LoweringError

__all__ = ["Failure", "Failures", "report"]


log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """Why a region runs eagerly: the node where that is known, and the first line of the reason."""

    region: str
    backend: str
    reason: str
    node: str | None = None

    def __str__(self) -> str:
        at = f" at {self.node!r}" if self.node is not None else ""
        return f"{self.region}: {self.backend} failed{at}: {self.reason}"


@final
class Failures:
    """A list of failures that only grows; each is in it once. Threads may add to it."""

    def __init__(self) -> None:
        self._found: dict[Failure, None] = {}
        self._lock = Lock()

    def add(self, failure: Failure) -> bool:
        """Adds a failure; whether it is new."""
        with self._lock:
            is_new = failure not in self._found
            self._found.setdefault(failure)
            return is_new

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Failure]:
        return iter(tuple(self._found))

    def __getitem__(self, place: int) -> Failure:
        return tuple(self._found)[place]

    def __repr__(self) -> str:
        return f"Failures({list(self)!r})"

    def __reduce__(self) -> tuple[type[Failures], tuple[()]]:
        """Copies and pickles of a program start with none of their own."""
        return Failures, ()


def report(failure: Failure, failures: Failures, *, strict: bool = False, error: Exception | None = None) -> None:
    """Adds a failure to the others and logs it once; raises it where whoever lowered the region wants that."""
    if failures.add(failure):
        log.warning("%s; it runs eagerly", failure)
    if strict:
        raise LoweringError(f"{failure}; without strict=True it would run eagerly") from error
