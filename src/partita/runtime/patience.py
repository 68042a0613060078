"""Patience with a compiler: for which calls it is not asked, since it has failed on such or was asked too often."""

from __future__ import annotations

from typing import final

from partita.runtime.recent import Recent
from partita.runtime.signature import Signature
from partita.runtime.variant import Cause, Fit, Variant

__all__ = ["Patience"]

#: How many times `keep` functions are made for calls of one family.
_TRIES = 4

#: On how many signatures of one kind a compiler may fail before it gets no others of that kind.
_FAILURES = 3


@final
class Patience:
    """What is known of the compilations of a body so far."""

    def __init__(self) -> None:
        self._tries: Recent[int] = Recent()
        self._failed: Recent[Cause] = Recent()
        #: By kind, the signatures that a compiler has failed on.
        self._failures: Recent[frozenset[Signature]] = Recent()

    def variant_for(self, signature: Signature, *, keep: int) -> Variant | None:
        """The variant without a function for a call that the body itself must run for; None if one may be made."""
        cause = self._failed.get(signature)
        if cause is not None:
            return Variant(Fit.exactly(signature), None, cause=cause)
        cause = self._failed.get(signature.kind) or self._impatience(signature, keep)
        return None if cause is None else Variant(Fit.of_kind(signature), None, cause=cause)

    def note_try(self, signature: Signature) -> None:
        """Counts a compilation."""
        self._tries.note(signature.family, (self._tries.get(signature.family) or 0) + 1)

    def note_failure(self, signature: Signature, cause: Cause) -> None:
        """Lets calls like this one run the body; all calls of its kind, if others of them have failed before."""
        self.note_try(signature)
        self._failed.note(signature, cause)
        failures = (self._failures.get(signature.kind) or frozenset()) | {signature}
        self._failures.note(signature.kind, failures)
        if len(failures) >= _FAILURES:
            self._failed.note(signature.kind, cause)

    def _impatience(self, signature: Signature, keep: int) -> Cause | None:
        tries = self._tries.get(signature.family) or 0
        return Cause(_IMPATIENT.format(tries)) if tries >= _TRIES * keep else None


_IMPATIENT = (
    "it was compiled {} times for calls that differ in nothing but sizes, constants, lengths of containers and "
    "settings of modules; make a tensor of what changes, or raise `keep`"
)
