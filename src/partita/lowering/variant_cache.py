"""The cache of compiled variants: shared by equal bodies, bounded, thread-safe, and storable.

It also decides for which calls no further compilation is attempted.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock, RLock
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar, final
from weakref import WeakSet, WeakValueDictionary, ref

from partita.errors import BackendError
from partita.lowering.cache_folder import CacheFolder
from partita.lowering.compilation import Compilation, Compiler
from partita.lowering.constants import Constants
from partita.lowering.dry_run import DryRun
from partita.lowering.signature import Signature
from partita.lowering.variant import Cause, Fit, Origin, Variant

log = logging.getLogger(__name__)

#: Variants by body and options: equal bodies are compiled once in a process.
_SHARED: WeakValueDictionary[Hashable, Variants] = WeakValueDictionary()
_LOCK = Lock()


def variants_for(key: Hashable | None, compiler: Compiler, *, keep: int, folder: CacheFolder | None = None) -> Variants:
    """The variants of all bodies with this key, compiler, `keep` and folder; new ones for a body without a key."""
    whole = (key, type(compiler), compiler, keep, folder)
    if key is None or not _is_hashable(whole):
        return Variants(compiler, keep=keep, folder=folder)
    with _LOCK:
        found = _SHARED.get(whole)
        if found is None:
            found = _SHARED[whole] = Variants(compiler, keep=keep, folder=folder)
        return found


def _is_hashable(value: object) -> bool:
    """Whether a value has a hash; a backend with a list among its options has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


#: Inductor and AOTAutograd (torch 2.13) keep the state of a compilation in globals: one at a time in a process.
_COMPILING = RLock()


@final
class Variants:
    """The compiled functions of equal bodies, at most `keep` for each user, least recently used evicted first."""

    def __init__(self, compiler: Compiler, *, keep: int, folder: CacheFolder | None = None) -> None:
        self.compiler = compiler
        #: Where other processes store functions of equal bodies.
        self._folder = folder
        self._keep_each = keep
        self._users: WeakSet[Any] = WeakSet()
        self._backoff = CompileBackoff()
        #: Most recently used first; replaced as a whole, so that it can be read without a lock.
        self._functions: tuple[Variant, ...] = ()
        self._ordering = Lock()

    def serve(self, user: object) -> None:
        """Makes room for `keep` more functions as long as `user` lives."""
        self._users.add(user)

    @property
    def _keep(self) -> int:
        return self._keep_each * max(1, len(self._users))

    def find(self, signature: Signature, values: Sequence[Any]) -> Variant | None:
        """A variant that serves this call, if there is one; without a function where none is to be compiled."""
        found = next((variant for variant in self._functions if variant.serves(signature, values)), None)
        if found is None:
            return self._backoff.variant_for(signature, keep=self._keep)
        self._use(found)
        return found

    def find_or_make(self, compilation: Compilation, *, user: object, region: str, title: str) -> Variant:
        """A variant that serves a call, compiled if need be; threads that wait for the same one share it."""
        with _COMPILING:
            found = self.find(compilation.signature, compilation.values)
            if found is None:
                found = self._loaded(compilation, title)
            if found is not None:
                return found
            with nullcontext() if self._folder is None else self._folder.kernels():
                made, seconds = self._made_by(compilation, title)
            made.origin = Origin(region, ref(user), seconds)
            if self._folder is not None:
                for entry in stored(self.compiler, [made]):
                    self._folder.store(entry)
            return made

    def _loaded(self, compilation: Compilation, title: str) -> Variant | None:
        """A variant from the folder that serves a call."""
        if self._folder is None or compilation.constants:
            return None
        for entry in self._folder.entries():
            if isinstance(entry, Stored) and entry.fit.takes(compilation.signature):
                with self._folder.kernels():
                    found = next(_restored(self.compiler, [entry]), None)
                if found is not None and found.serves(compilation.signature, compilation.values):
                    log.info("loaded %s from %s", title, self._folder.folder)
                    self._use(found)
                    return found
        return None

    def can_dry_run(self, compilation: Compilation) -> bool:
        """Whether the body runs on fake inputs like those of a compilation that has failed."""
        with _COMPILING:
            return compilation.can_dry_run()

    def give_up(self, signature: Signature, cause: Cause) -> None:
        """Makes calls of this signature run the body eagerly from now on, where no function serves them."""
        self._backoff.note_failure(signature, cause)

    def _made_by(self, compilation: Compilation, title: str) -> tuple[Variant, float]:
        made, seconds = timed(lambda: _run(compilation), title=title, backend=self.compiler.name)
        self._backoff.note_try(compilation.signature)
        self._use(made)
        return made, seconds

    def _use(self, variant: Variant) -> None:
        """Moves a variant to the front, and evicts the last if there are too many."""
        if self._functions and self._functions[0] is variant:
            return
        with self._ordering:
            others = (other for other in self._functions if other is not variant and other.is_current())
            self._functions = (variant, *others)[: self._keep]

    def __deepcopy__(self, memo: dict[int, Any]) -> Variants:
        """Copies share the functions: they hold no state."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        functions = stored(self.compiler, self._functions)
        return _unpickled, (_pickled(self.compiler), self._keep_each, functions)


def _unpickled(pickled: PickledCompiler | Compiler, keep: int, functions: tuple[Stored, ...]) -> Variants:
    compiler = pickled.compiler() if isinstance(pickled, PickledCompiler) else pickled
    variants = Variants(compiler, keep=keep)
    variants._functions = tuple(_restored(compiler, functions))
    return variants


Made = TypeVar("Made")


def timed(compile_it: Callable[[], Made], *, title: str, backend: str) -> tuple[Made, float]:
    """What is compiled, and how many seconds that took; logged before and after."""
    log.info("compiling %s with %s", title, backend)
    started = perf_counter()
    made = compile_it()
    seconds = perf_counter() - started
    log.info("compiled %s with %s in %.1f s", title, backend, seconds)
    return made, seconds


def _run(compilation: Compilation) -> Variant:
    """The variant; one for static sizes where the compiler fails on symbolic ones."""
    try:
        return compilation.run()
    except Exception as error:
        if not compilation.dynamic_sizes:
            raise
        name = compilation.compiler.name
        log.info("%s failed on dynamic sizes and gets static ones: %s", name, Cause.of(error).reason)
        return replace(compilation, dynamic_sizes={}).run()


#: How many times `keep` functions are compiled for calls of one family.
_TRIES = 4

#: On how many signatures with one static key a compiler may fail before it gets no others.
_FAILURES = 3


@final
class CompileBackoff:
    """Limits compilations: none for signatures that failed before, and a bounded number for each family."""

    def __init__(self) -> None:
        self._tries: LruTable[int] = LruTable()
        self._failed: LruTable[Cause] = LruTable()
        #: By static key, the signatures that the compiler has failed on.
        self._failures: LruTable[frozenset[Signature]] = LruTable()

    def variant_for(self, signature: Signature, *, keep: int) -> Variant | None:
        """The variant without a function for a call that must run eagerly; None if it may be compiled for."""
        cause = self._failed.get(signature)
        if cause is not None:
            return Variant(Fit.exactly(signature), None, cause=cause)
        cause = self._failed.get(signature.static_key)
        tries = self._tries.get(signature.family) or 0
        if cause is None and tries >= _TRIES * keep:
            cause = Cause(_TOO_MANY_COMPILATIONS.format(tries))
        return None if cause is None else Variant(Fit.for_any_sizes(signature), None, cause=cause)

    def note_try(self, signature: Signature) -> None:
        """Counts a compilation."""
        self._tries.note(signature.family, (self._tries.get(signature.family) or 0) + 1)

    def note_failure(self, signature: Signature, cause: Cause) -> None:
        """Makes calls of this signature run eagerly; all calls of its static key, after repeated failures."""
        self.note_try(signature)
        self._failed.note(signature, cause)
        failures = (self._failures.get(signature.static_key) or frozenset()) | {signature}
        self._failures.note(signature.static_key, failures)
        if len(failures) >= _FAILURES:
            self._failed.note(signature.static_key, cause)


_TOO_MANY_COMPILATIONS = (
    "it was compiled {} times for calls that differ in nothing but sizes, constants, lengths of containers and "
    "settings of modules; make a tensor of what changes, or raise `max_variants`"
)


Value = TypeVar("Value")


@final
class LruTable(Generic[Value]):
    """A thread-safe table of at most `most` entries; the oldest are evicted."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._entries: dict[Hashable, Value] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        """The value of this key, unless it was evicted."""
        return self._entries.get(key)

    def note(self, key: Hashable, value: Value) -> None:
        """Stores a value, replacing an older one."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]

    def __len__(self) -> int:
        return len(self._entries)


class PickledCompiler(NamedTuple):
    """A compiler as a pickle of its own, so that one whose class is missing has a name in the error."""

    name: str
    kind: str
    data: bytes

    def compiler(self) -> Compiler:
        """The compiler; raises where its class cannot be imported."""
        try:
            found: Compiler = pickle.loads(self.data)
        except (ImportError, AttributeError) as error:
            raise BackendError(
                f"this program was lowered by the backend {self.name!r} ({self.kind}), which cannot be imported here: "
                f"{error}; install the package that has it, or lower the original program here with another backend"
            ) from error
        return found


def _pickled(compiler: Compiler) -> PickledCompiler | Compiler:
    """A pickle of the compiler; itself where the pickler around it may know more of its class than pickle does."""
    kind = type(compiler)
    if kind.__module__ == "__main__":
        return compiler
    try:
        return PickledCompiler(compiler.name, f"{kind.__module__}.{kind.__qualname__}", pickle.dumps(compiler))
    except Exception:
        return compiler


class Stored(NamedTuple):
    """A variant as data, where the backend can store its functions as bytes."""

    fit: Fit
    dry_run: DryRun | None
    function: bytes
    constants: Constants | None = None


def stored(compiler: Any, variants: Iterable[Variant]) -> tuple[Stored, ...]:
    """The variants that can be stored; the others will be recompiled."""
    return tuple(_stored(compiler, variants)) if hasattr(compiler, "save") and hasattr(compiler, "load") else ()


def _stored(compiler: Any, variants: Iterable[Variant]) -> Iterator[Stored]:
    for variant in variants:
        try:
            yield Stored(variant.fit, variant.dry_run, compiler.save(variant.function), variant.constants)
        except Exception as error:
            reason = Cause.of(error).reason
            log.warning("%s cannot store a function, so it will be compiled again: %s", compiler.name, reason)


def _restored(compiler: Any, functions: Iterable[Stored]) -> Iterator[Variant]:
    """The variants that were stored; those that cannot be loaded here will be recompiled."""
    for fit, dry_run, function, constants in functions:
        try:
            yield Variant(fit, compiler.load(function), dry_run, constants=constants)
        except Exception as error:
            reason = Cause.of(error).reason
            log.warning("%s cannot load a function, so it is compiled again: %s", compiler.name, reason)
