"""Failures of compilations, kept so that the user can read them after the program has run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import final

from partita._plain_help import PlainHelp
from partita.errors import LoweringError

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Failure(metaclass=PlainHelp):
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
    """An append-only list of distinct failures; thread-safe."""

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

    def __getitem__(self, index: int) -> Failure:
        return tuple(self._found)[index]

    def __repr__(self) -> str:
        return f"Failures({list(self)!r})"

    def __reduce__(self) -> tuple[type[Failures], tuple[()]]:
        """Copies and pickles of a program start with an empty list."""
        return Failures, ()


def report(failure: Failure, failures: Failures, *, strict: bool = False, error: Exception | None = None) -> None:
    """Records a failure and logs it once; raises it with `strict`."""
    if failures.add(failure):
        log.warning("%s; it runs eagerly", failure)
    if strict:
        raise LoweringError(f"{failure}; without strict=True it would run eagerly") from error
