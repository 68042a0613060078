"""What was compiled for the regions of a plan, kept so that the user can read it after the program has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import final, overload

from partita._plain_help import PlainHelp
from partita.plans.progress import Progress


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
class Compilations(Sequence[CompiledBody]):
    """An append-only list of compiled bodies; thread-safe."""

    def __init__(self) -> None:
        self._found: list[CompiledBody] = []
        self.progress = Progress()
        self._lock = Lock()

    def add(self, compiled: CompiledBody) -> None:
        """Adds a compiled body."""
        with self._lock:
            self._found.append(compiled)
        self.progress.note(compiled.region, compiled.seconds)

    @property
    def seconds(self) -> float:
        """How long all compilations took together."""
        return sum(compiled.seconds for compiled in self)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[CompiledBody]:
        return iter(tuple(self._found))

    @overload
    def __getitem__(self, index: int) -> CompiledBody: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CompiledBody]: ...
    def __getitem__(self, index: int | slice) -> CompiledBody | Sequence[CompiledBody]:
        return self._found[index]

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def __repr__(self) -> str:
        return f"Compilations({list(self)!r})"

    def __reduce__(self) -> tuple[type[Compilations], tuple[()]]:
        """Copies and pickles of a program start with an empty list."""
        return Compilations, ()
