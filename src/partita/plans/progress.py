"""How far compiling has come: a line on the terminal now and then, where it takes over a second."""

from __future__ import annotations

import logging
import os
import sys
from threading import Lock
from typing import final

log = logging.getLogger(__name__)

#: Set to 1, lines are written to stderr though it is no terminal; set to 0, they never are.
_SWITCH = "PARTITA_PROGRESS"


@final
class Progress:
    """Counts the compiled bodies of a plan, of which there are `expected`."""

    def __init__(self) -> None:
        self._expected: dict[str, object] = {}
        self._done: set[object] = set()
        self._seconds = 0.0
        self._said_at = 0.0
        self._lock = Lock()

    def expect(self, region: str, body: object) -> None:
        """Counts a region that will be compiled; those with equal bodies count as one."""
        self._expected[region] = body

    def note(self, region: str, seconds: float) -> None:
        """Counts the body of a region as compiled, which took so long; says so if a second has passed."""
        with self._lock:
            self._seconds += seconds
            body = self._expected.get(region, region)
            if body in self._done:
                return
            self._done.add(body)
            done, total = len(self._done), max(len(set(self._expected.values())), len(self._done))
            is_due = self._seconds >= 1 and (self._seconds - self._said_at >= 1 or done == total)
            self._said_at = self._seconds if is_due else self._said_at
        text = f"{done} of {total} bodies, {self._seconds:.0f} s"
        log.info(text)
        if is_due and _is_shown():
            sys.stderr.write(f"partita: {text}\n")
            sys.stderr.flush()


def _is_shown() -> bool:
    switch = os.environ.get(_SWITCH)
    return sys.stderr.isatty() if switch is None else switch != "0"
