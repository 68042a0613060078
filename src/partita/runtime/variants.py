"""Variants: what has been compiled of a body so far, one function a signature, and the least used ones forgotten."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock, RLock
from time import perf_counter
from typing import Any, final
from weakref import WeakSet

from partita.runtime.compilation import Compilation, Compiler
from partita.runtime.signature import Signature
from partita.runtime.stored import Stored, restored, stored
from partita.runtime.variant import Cause, Fit, Variant

__all__ = ["Variants"]

log = logging.getLogger(__name__)

#: Inductor and AOTAutograd (torch 2.13) keep the state of a compilation in globals: one at a time in a process.
_COMPILING = RLock()

#: How many times `keep` functions are made for calls that differ in sizes and constants alone.
_PATIENCE = 4


@final
class Variants:
    """Functions for equal bodies, shared by all that run one of them; threads may ask for them side by side."""

    def __init__(self, compiler: Compiler, *, keep: int) -> None:
        self.compiler = compiler
        self._keep_each = keep
        self._users: WeakSet[Any] = WeakSet()
        self._tries: Counter[object] = Counter()
        #: Calls of these kinds run the body itself where no function serves them.
        self._eager: dict[object, Variant] = {}
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
        """A variant that serves this call, if there is one."""
        found = next((variant for variant in self._functions if variant.serves(signature, values)), None)
        if found is None:
            return self._eager.get(signature.kind)
        self._use(found)
        return found

    def find_or_make(
        self, signature: Signature, values: Sequence[Any], begin: Callable[[], Compilation], *, title: str
    ) -> Variant:
        """A variant that serves this call, compiled if need be; who waits for the same one does not compile again."""
        with _COMPILING:
            return self.find(signature, values) or self._made_for(signature, begin, title)

    def give_up(self, signature: Signature, cause: Cause) -> Variant:
        """Lets calls of this kind run the body itself from now on, where no function serves them."""
        return self._eager.setdefault(signature.kind, Variant(Fit.of_kind(signature), None, cause=cause))

    def _made_for(self, signature: Signature, begin: Callable[[], Compilation], title: str) -> Variant:
        tries = self._tries[signature.kind]
        if tries >= _PATIENCE * self._keep:
            return self.give_up(signature, Cause(_IMPATIENT.format(tries)))
        self._tries[signature.kind] += 1
        log.info("compiling %s with %s", title, self.compiler.name)
        started = perf_counter()
        try:
            made = _run(begin())
        except Exception as error:
            self.give_up(signature, Cause.of(error))
            raise
        log.info("compiled %s with %s in %.1f s", title, self.compiler.name, perf_counter() - started)
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


_IMPATIENT = (
    "it was compiled {} times for calls that differ in nothing but sizes and constants; make a tensor of what changes, "
    "or raise `keep`"
)
