"""Variants: what has been compiled of a body so far, one function a signature, and the least used ones forgotten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock, RLock
from time import perf_counter
from typing import Any, final
from weakref import WeakSet

from partita.runtime.compilation import Compilation, Compiler
from partita.runtime.patience import Patience
from partita.runtime.signature import Signature
from partita.runtime.stored import Stored, restored, stored
from partita.runtime.variant import Cause, Variant

__all__ = ["Variants"]

log = logging.getLogger(__name__)

#: Inductor and AOTAutograd (torch 2.13) keep the state of a compilation in globals: one at a time in a process.
_COMPILING = RLock()


@final
class Variants:
    """Functions for equal bodies, shared by all that run one of them; threads may ask for them side by side."""

    def __init__(self, compiler: Compiler, *, keep: int) -> None:
        self.compiler = compiler
        self._keep_each = keep
        self._users: WeakSet[Any] = WeakSet()
        self._patience = Patience()
        #: The last used first; replaced as a whole, so that it can be read without a lock.
        self._functions: tuple[Variant, ...] = ()
        self._ordering = Lock()

    def serve(self, user: object) -> None:
        """Keeps as many functions for `user` as for anyone else, as long as it lives."""
        self._users.add(user)

    @property
    def _keep(self) -> int:
        return self._keep_each * max(1, len(self._users))

    def find(self, signature: Signature, values: Sequence[Any]) -> Variant | None:
        """A variant that serves this call, if there is one; without a function, where none is to be made."""
        found = next((variant for variant in self._functions if variant.serves(signature, values)), None)
        if found is None:
            return self._patience.variant_for(signature, keep=self._keep)
        self._use(found)
        return found

    def find_or_make(self, compilation: Compilation, *, title: str) -> Variant:
        """A variant that serves a call, compiled if need be; who waits for the same one does not compile again."""
        with _COMPILING:
            found = self.find(compilation.signature, compilation.values)
            return found or self._made_by(compilation, title)

    def can_be_rehearsed(self, compilation: Compilation) -> bool:
        """Whether the body runs on inputs that look like those of a compilation that has failed."""
        with _COMPILING:
            return compilation.can_be_rehearsed()

    def give_up(self, signature: Signature, cause: Cause) -> None:
        """Lets calls like this one run the body itself from now on, where no function serves them."""
        self._patience.note_failure(signature, cause)

    def _made_by(self, compilation: Compilation, title: str) -> Variant:
        log.info("compiling %s with %s", title, self.compiler.name)
        started = perf_counter()
        made = _run(compilation)
        log.info("compiled %s with %s in %.1f s", title, self.compiler.name, perf_counter() - started)
        self._patience.note_try(compilation.signature)
        self._use(made)
        return made

    def _use(self, variant: Variant) -> None:
        """Puts a variant first, and forgets the last if there are too many."""
        if self._functions and self._functions[0] is variant:
            return
        with self._ordering:
            others = (other for other in self._functions if other is not variant)
            self._functions = (variant, *others)[: self._keep]

    def __deepcopy__(self, memo: dict[int, Any]) -> Variants:
        """A copy of a program uses the functions of the original: they hold no state."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        functions = stored(self.compiler, self._functions)
        return _unpickled, (self.compiler, self._keep_each, functions)


def _unpickled(compiler: Compiler, keep: int, functions: tuple[Stored, ...]) -> Variants:
    variants = Variants(compiler, keep=keep)
    variants._functions = restored(compiler, functions)
    return variants


def _run(compilation: Compilation) -> Variant:
    """The variant; where symbols are too much for the compiler, one for exactly these sizes."""
    try:
        return compilation.run()
    except Exception as error:
        if not compilation.open_sizes:
            raise
        name = compilation.compiler.name
        log.info("%s failed on symbolic sizes, so it gets those of the call: %s", name, Cause.of(error).reason)
        return compilation.with_known_sizes().run()
