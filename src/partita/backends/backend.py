"""The backend protocol, its optional attributes, lookup by entry point, and the eager backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, final, runtime_checkable

from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import OptionError
from partita.near_names import near_names

#: A compiled function: it takes the body's inputs as positional arguments and returns the body's outputs.
Compiled: TypeAlias = Callable[..., Sequence[Any]]


@runtime_checkable
class Backend(Protocol):
    """A compiler: a frozen dataclass whose fields are its options. It knows nothing of regions.

    It may also have `tolerance`, a `Tolerance` by which it changes numbers (exact if missing), `trains`, whether
    gradients flow through its functions (true if missing), `takes_symbols`, whether one function may serve inputs of
    several sizes (true if missing), `picks_kernels`, whether it keeps the kernels that eager mode picks (false if
    missing), and `wants_constants`, whether it gets parameters and buffers as tensors that the body holds, and not as
    inputs (false if missing; true means that it does not train). One whose functions can be stored has
    `save(compiled) -> bytes` and `load(data) -> compiled` as well, and may have a `version`, a text: a delegate that
    another version has stored is refused, unless `reads_version(version)` is true.
    """

    @property
    def name(self) -> str:
        """The name that users refer to it by."""

    def refusal(self, node: Node) -> str | None:
        """Why it does not support `node`, in a few words; None if it does."""

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """A function that does what `body` does, for inputs like `inputs`.

        `body` is the backend's own: it may change it. All nodes run in the modes that are in force now. `inputs` are
        fake tensors and plain or symbolic numbers; the function is called with real ones of the same dtypes, devices,
        strides, `requires_grad` and sizes, where symbolic sizes stand for any that the guards of their shape
        environment allow. It mutates its inputs as the body does, once, and returns a tuple or list.
        """


def is_backend(candidate: object) -> TypeGuard[Backend]:
    """Whether `candidate` can compile; a class has the methods of its instances, but is none."""
    return isinstance(candidate, Backend) and not isinstance(candidate, type)


def tolerance_of(backend: Backend) -> Tolerance:
    """How far the backend may change numbers."""
    tolerance = getattr(backend, "tolerance", EXACT)
    if not isinstance(tolerance, Tolerance):
        raise OptionError(f"backend {backend.name!r} has the tolerance {tolerance!r}; give it a partita.Tolerance")
    return tolerance


def trains(backend: Backend) -> bool:
    """Whether gradients flow through the functions of the backend; never to constants that are compiled in."""
    return bool(getattr(backend, "trains", True)) and not wants_constants(backend)


def wants_constants(backend: Backend) -> bool:
    """Whether the backend compiles the values of parameters and buffers into its functions."""
    return bool(getattr(backend, "wants_constants", False))


def picks_kernels(backend: Backend) -> bool:
    """Whether the backend keeps the kernels that eager mode picks, for which it must know what requires gradients."""
    return bool(getattr(backend, "picks_kernels", False))


def takes_symbols(backend: Backend) -> bool:
    """Whether one function may serve inputs of several sizes."""
    return bool(getattr(backend, "takes_symbols", True))


_GROUP = "partita.backends"


def find_backend(wanted: str | Backend) -> Backend:
    """The backend of that name, with its default options; a backend itself is returned."""
    if is_backend(wanted):
        return wanted
    if not isinstance(wanted, str):
        raise OptionError(f"a backend is a name or has `name`, `refusal` and `compile`; {wanted!r} is neither")
    if wanted in _REGISTERED:
        return _REGISTERED[wanted]
    found = _entries().get(wanted)
    if found is None:
        _entries_in.cache_clear()  # A package may have been installed since, as from a notebook.
        found = _entries().get(wanted)
    if found is None:
        names = backend_names()
        near = near_names(wanted, names)
        own = "" if near else ". Your own is found once its module (--import MODULE) has called register_backend"
        raise OptionError(f"no backend is called {wanted!r}; try {', '.join(map(repr, near or names))}{own}")
    try:
        made = found.load()()
    except Exception as error:
        raise OptionError(f"backend {wanted!r} cannot be loaded: {found.value} raised {error}") from error
    if not is_backend(made):
        raise OptionError(f"{found.value}, the entry point of backend {wanted!r}, makes {made!r}, which is no backend")
    return made


def register_backend(backend: Backend) -> None:
    """Makes a backend known by its name in this process; packages have an entry point instead."""
    if not is_backend(backend):
        raise OptionError(f"{backend!r} is no backend: it needs `name`, `refusal` and `compile`")
    if backend.name in _entries() or _REGISTERED.setdefault(backend.name, backend) != backend:
        raise OptionError(f"another backend is called {backend.name!r}; choose another name")


#: Backends of this process.
_REGISTERED: dict[str, Backend] = {}


def backend_names() -> list[str]:
    """The names of all backends that are installed or registered."""
    return sorted({*_entries(), *_REGISTERED})


def _entries() -> Mapping[str, EntryPoint]:
    return _entries_in(tuple(sys.path))


@lru_cache(maxsize=4)
def _entries_in(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The entry points of all packages on this path: finding them takes milliseconds, and many names are looked up."""
    own = [EntryPoint(name, f"partita.backends:{kind}", _GROUP) for name, kind in _OWN.items()]
    return {entry.name: entry for entry in (*own, *entry_points(group=_GROUP))}


#: Partita's own backends, which are found in a source tree that is not installed too.
_OWN = {"aot_eager": "AotEager", "aot_inductor": "AotInductor", "eager": "Eager", "inductor": "Inductor"}


@final
@dataclass(frozen=True, slots=True)
class Eager(metaclass=PlainHelp):
    """Runs the body unchanged; for tests, and to tell errors of a compiler from those of a partition."""

    name: ClassVar[str] = "eager"
    tolerance: ClassVar[Tolerance] = EXACT
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        """Nothing is refused."""
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Compiled:
        """The body itself."""
        return body.forward
