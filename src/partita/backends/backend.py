"""What a backend is: it says which nodes it refuses, and makes a function of a body; it knows nothing of regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

from torch.fx import GraphModule, Node

from partita.errors import OptionError
from partita.graphs.tolerance import EXACT, Tolerance

__all__ = ["Backend", "Compiled", "is_backend", "picks_kernels", "takes_symbols", "tolerance_of", "trains"]

#: What a backend makes: a function of the body's inputs, one after another, that gives the body's outputs.
Compiled: TypeAlias = Callable[..., Sequence[Any]]


@runtime_checkable
class Backend(Protocol):
    """A compiler: a frozen dataclass whose fields are its options.

    It may also have `tolerance`, a `Tolerance` by which it changes numbers (exact if missing), `trains`, whether
    gradients flow through what it makes (true if missing), `takes_symbols`, whether one function may serve inputs of
    several sizes (true if missing), and `picks_kernels`, whether it keeps the kernels that eager mode picks (false if
    missing). One whose functions can be stored has `save(compiled) -> bytes` and
    `load(data) -> compiled` as well.
    """

    @property
    def name(self) -> str:
        """What users call it."""

    def refusal(self, node: Node) -> str | None:
        """Why it does not take `node`, in a few words; None if it does."""

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """A function that does what `body` does, for inputs like `inputs`.

        `body` is the backend's own: it may change it. All nodes run in the modes that are in force now. `inputs` are
        fake tensors and plain or symbolic numbers; the function is called with real ones of the same dtypes, devices,
        strides, `requires_grad` and sizes, where symbolic sizes stand for any that the guards of their shape
        environment allow. It writes to its inputs what the body writes, once, and gives a tuple or list.
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
    """Whether gradients flow through what the backend makes."""
    return bool(getattr(backend, "trains", True))


def picks_kernels(backend: Backend) -> bool:
    """Whether the backend keeps the kernels that eager mode picks, for which it must know what requires gradients."""
    return bool(getattr(backend, "picks_kernels", False))


def takes_symbols(backend: Backend) -> bool:
    """Whether one function may serve inputs of several sizes."""
    return bool(getattr(backend, "takes_symbols", True))
