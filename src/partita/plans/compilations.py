"""What was compiled for the regions of a plan, and what failed, kept to be read after the program has run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar, final, overload

from partita._plain_help import PlainHelp
from partita.errors import LoweringError
from partita.plans.progress import Progress

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class CompiledBody(metaclass=PlainHelp):
    """A compiled function that a region calls; prints as a line.

    `inputs` are the values that it was compiled for, without parameters: dtypes and sizes of tensors, `*` for a dynamic
    size, and numbers. `gradients` says whether a backward through it is possible.
    """

    region: str
    backend: str
    inputs: tuple[str, ...]
    gradients: bool
    #: How long the compilation took; 0 where the region uses a function that was there already.
    seconds: float
    #: The region with an equal body, maybe of another plan, that the function was compiled for; None for this one.
    shared_with: str | None = None
    #: Whether the function came from a file or a pickle.
    loaded: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it was compiled for this region."""
        return self.shared_with is None and not self.loaded

    def __str__(self) -> str:
        if self.loaded:
            how = "was loaded"
        elif self.shared_with is not None:
            how = f"is shared with {self.shared_with!r}"
        else:
            how = f"was compiled in {self.seconds:.1f} s"
        gradients = " with gradients" if self.gradients else ""
        return f"{self.region}: {self.backend} for ({', '.join(self.inputs)}){gradients} {how}"


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


_Entry = TypeVar("_Entry", CompiledBody, Failure)


class _Record(Sequence[_Entry]):
    """An append-only list; thread-safe. Copies and pickles of a program start with an empty one."""

    def __init__(self) -> None:
        self._found: list[_Entry] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[_Entry]:
        return iter(tuple(self._found))

    @overload
    def __getitem__(self, index: int) -> _Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Entry]: ...
    def __getitem__(self, index: int | slice) -> _Entry | Sequence[_Entry]:
        return self._found[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@final
class Compilations(_Record[CompiledBody]):
    """The compiled bodies; prints as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def add(self, compiled: CompiledBody) -> None:
        """Adds a compiled body."""
        with self._lock:
            self._found.append(compiled)
        self.progress.note(compiled.region, compiled.seconds)

    @property
    def seconds(self) -> float:
        """How long all compilations took together."""
        return sum(compiled.seconds for compiled in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@contextmanager
def logged_once() -> Iterator[None]:
    """Logs a failure once in the block, however many plans with the same regions have it."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        found = text not in seen
        seen.add(text)
        return found

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


@final
class Failures(_Record[Failure]):
    """The failures, each once."""

    def add(self, failure: Failure) -> bool:
        """Adds a failure; whether it is new."""
        with self._lock:
            is_new = failure not in self._found
            self._found += [failure] if is_new else []
            return is_new

    def report(self, failure: Failure, *, strict: bool = False, error: Exception | None = None) -> None:
        """Adds a failure and logs it once; raises it with `strict`."""
        if self.add(failure):
            log.warning("%s; it runs eagerly", failure)
        if strict:
            raise LoweringError(f"{failure}; without strict=True it would run eagerly") from error
