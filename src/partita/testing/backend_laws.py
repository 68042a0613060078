"""Laws for backends: what holds for any compiler that partita can call, checked on bodies and on whole programs."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from partita.backends import Backend, find_backend
from partita.errors import OptionError
from partita.testing.backend_bodies import BODIES, Body
from partita.testing.backend_checking import BackendChecking
from partita.testing.backend_report import BackendReport
from partita.testing.build import random_case
from partita.testing.case import Case
from partita.testing.laws import LawError

__all__ = ["check_backend"]


def check_backend(
    backend: str | Backend, *, programs: int | Iterable[Case] = 5, bodies: Iterable[str] | None = None
) -> BackendReport:
    """Checks the laws on small bodies, all or those named, and on generated or given programs; raises if one is broken.

    What the backend refuses is left out, and a region that it fails on is not held against it as long as something
    compiles: both are in the notes. The message of the error is the report.
    """
    found = find_backend(backend)
    cases = [random_case(seed) for seed in range(programs)] if isinstance(programs, int) else list(programs)
    checking = BackendChecking(found)
    checking.check_value()
    for body in BODIES if bodies is None else map(_named, bodies):
        checking.check_body(body)
    for case in cases:
        checking.check_program(case)
    report = checking.report()
    if not report.holds:
        raise LawError(str(report))
    return report


def _named(name: str) -> Body:
    found = {body.name: body for body in BODIES}
    if name in found:
        return found[name]
    near = get_close_matches(name, found, n=3) or found
    raise OptionError(f"no body is called {name!r}; try {', '.join(map(repr, near))}")
