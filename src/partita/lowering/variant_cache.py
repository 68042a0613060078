"""Cache, backoff, sharing and storage of specializations."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from threading import Lock, RLock
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar, final
from weakref import WeakSet, WeakValueDictionary

from partita.lowering.compilation import Compilation, Compiler
from partita.lowering.dry_run import DryRun
from partita.lowering.signature import Signature
from partita.lowering.variant import Cause, Fit, Variant

__all__ = ["LruTable", "Variants", "variants_for"]


# Sharing: equal bodies that are lowered alike have one set of variants in a process, so that each is compiled once.


#: What lives as long as anyone uses it.
_SHARED: WeakValueDictionary[Hashable, Variants] = WeakValueDictionary()
_LOCK = Lock()


def variants_for(key: Hashable | None, compiler: Compiler, *, keep: int) -> Variants:
    """The variants of all bodies with this key that are lowered alike; new ones for a body without a key."""
    whole = (key, type(compiler), compiler, keep)
    if key is None or not _is_hashable(whole):
        return Variants(compiler, keep=keep)
    with _LOCK:
        found = _SHARED.get(whole)
        if found is None:
            found = _SHARED[whole] = Variants(compiler, keep=keep)
        return found


def _is_hashable(value: object) -> bool:
    """Whether a value has a hash; a backend with a list among its options, say, has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


# Variants: what has been compiled of a body so far, one function a signature, and the least used ones forgotten.


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
        self._patience = CompileBackoff()
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


# Patience with a compiler: for which calls it is not asked, since it has failed on such or was asked too often.


#: How many times `keep` functions are made for calls of one family.
_TRIES = 4

#: On how many signatures of one kind a compiler may fail before it gets no others of that kind.
_FAILURES = 3


@final
class CompileBackoff:
    """What is known of the compilations of a body so far."""

    def __init__(self) -> None:
        self._tries: LruTable[int] = LruTable()
        self._failed: LruTable[Cause] = LruTable()
        #: By kind, the signatures that a compiler has failed on.
        self._failures: LruTable[frozenset[Signature]] = LruTable()

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


# What was noted lately: a table that forgets its oldest entries, so that no program makes it grow without end.


Value = TypeVar("Value")


@final
class LruTable(Generic[Value]):
    """At most `most` entries, those that were noted last; threads may use it side by side."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._entries: dict[Hashable, Value] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        """What was noted under this key, unless it is forgotten."""
        return self._entries.get(key)

    def note(self, key: Hashable, value: Value) -> None:
        """Notes a value, in the place of an older one."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]

    def __len__(self) -> int:
        return len(self._entries)


# Stored variants: compiled functions as bytes, where their backend can store them, to run in another process.


class Stored(NamedTuple):
    """A variant as data."""

    fit: Fit
    findings: DryRun | None
    function: bytes


def stored(compiler: Any, variants: Iterable[Variant]) -> tuple[Stored, ...]:
    """The variants that can be stored; the others will be compiled again."""
    return tuple(_stored(compiler, variants)) if hasattr(compiler, "save") and hasattr(compiler, "load") else ()


def restored(compiler: Any, functions: Iterable[Stored]) -> tuple[Variant, ...]:
    """The variants that these were; what cannot be loaded here will be compiled again."""
    return tuple(_restored(compiler, functions))


def _stored(compiler: Any, variants: Iterable[Variant]) -> Iterator[Stored]:
    for variant in variants:
        try:
            yield Stored(variant.fit, variant.findings, compiler.save(variant.function))
        except Exception as error:
            reason = Cause.of(error).reason
            log.warning("%s cannot store a function, so it will be compiled again: %s", compiler.name, reason)


def _restored(compiler: Any, functions: Iterable[Stored]) -> Iterator[Variant]:
    for fit, findings, function in functions:
        try:
            yield Variant(fit, compiler.load(function), findings)
        except Exception as error:
            log.info("%s cannot load a function, so it is compiled again: %s", compiler.name, Cause.of(error).reason)
