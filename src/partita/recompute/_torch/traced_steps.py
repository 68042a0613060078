"""Recomputed bodies in a training step that is traced whole: the operators of a body occur again in its backward.

A step that `make_fx` traces includes its backward, and no partitioner follows. What the backward needs of a body is
recomputed while the backward is traced. A body that uses an RNG, or mutates what it did not allocate, cannot be traced
twice; its results are saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.modes import read_ambient, restore_autocast, traces_after_dispatch, variable_set
from partita._torch.pytrees import leaves_of, map_leaves, tensors_in
from partita._torch.tensors import version_of
from partita.errors import RecomputeError
from partita.hops._torch.body import run_body
from partita.program._torch.saved_tensors import updated_statistics
from partita.recompute._torch.keep_records import may_use_rng, mutated_by

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


def traces_whole_step() -> bool:
    """Whether `make_fx` is tracing, backward included, and not AOTAutograd, whose partitioner reads tags."""
    return traces_after_dispatch() and TracingContext.try_get() is None


@final
class TracedStep:
    """One body in such a step; what autograd saves of it is numbered, and recomputed when the backward unpacks it."""

    def __init__(
        self,
        body: Callable[..., Any],
        operands: tuple[Any, ...],
        keywords: Mapping[str, Any],
        again: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._call = (body, operands, keywords)
        leaves = tensors_in((operands, dict(keywords)))
        self._inputs = frozenset(map(id, leaves))
        state = (*body.parameters(), *body.buffers()) if isinstance(body, nn.Module) else ()
        self._read = [_Versioned(tensor) for tensor in (*leaves, *state)]
        self._again = again
        self._ambient = read_ambient()
        self._effects = _EffectDetector()
        self._saved: list[_Versioned] = []
        self._recomputed: list[Tensor] | None = None
        self.kept: list[Any] = []
        #: During recomputation: the kept results that come next.
        self.replayed: Iterator[Any] | None = None

    def first(self) -> Any:
        """Runs the body for the first time."""
        body, operands, keywords = self._call
        with variable_set(_STEP, self), self._effects, saved_tensors_hooks(self._pack, self._unpack):
            return run_body(nullcontext(), body, operands, keywords)

    def _pack(self, tensor: Tensor) -> Any:
        if id(tensor) in self._inputs or _STEP.get() is not self:  # An input, or inside a kept segment.
            return _Versioned(tensor)
        self._saved.append(_Versioned(tensor))
        return len(self._saved) - 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Versioned):
            return packed.unmutated()
        number: int = packed
        saved = self._saved[number].unmutated()
        if self._recomputed is None and not self._effects.found and not any(read.is_mutated for read in self._read):
            self._recomputed = self._run_again()
        return self._recomputed[number] if self._recomputed else saved

    def _run_again(self) -> list[Tensor]:
        """The tensors that autograd saves in a second run, in the order of the first; empty if the runs differ."""
        body, operands, keywords = self._call
        detached: dict[int, Tensor] = {}

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in detached:
                detached[id(leaf)] = _new_leaf(leaf)
            return detached[id(leaf)]

        operands, keywords = map_leaves(fresh, (operands, dict(keywords)))
        inputs, found = {id(tensor) for tensor in detached.values()}, list[Tensor]()

        def pack(tensor: Tensor) -> None:
            if id(tensor) not in inputs and _STEP.get() is self:
                found.append(tensor.detach())
                if len(found) == len(self._saved):
                    raise _AllRecomputedError

        self.replayed = iter(self.kept)
        try:
            with (
                variable_set(_STEP, self),
                _autocast_of(self._ambient),
                torch.enable_grad(),
                self._again or nullcontext(),
                saved_tensors_hooks(pack, _never_unpacked),
            ):
                run_body(nullcontext(), body, operands, keywords)
        except _AllRecomputedError:
            pass  # Operators after the last saved tensor would be dead code.
        finally:
            self.replayed = None
        return found if list(map(_type_of, found)) == [_type_of(saved.tensor) for saved in self._saved] else []


@final
class _Versioned:
    """A tensor with its version counter when it was saved or passed."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, version_of(tensor)

    @property
    def is_mutated(self) -> bool:
        return version_of(self.tensor) != self._version

    def unmutated(self) -> Tensor:
        if self.is_mutated:
            raise RecomputeError(
                "a tensor that the backward of a checkpoint needs was mutated after it was saved; plain autograd "
                "refuses that too: mutate a copy"
            )
        return self.tensor


class _AllRecomputedError(Exception):
    """Ends a second run early, when all saved tensors are recomputed."""


def _type_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.dim()


def run_kept_in_step(run: Callable[[], Any]) -> Any:
    """Calls `run`; in a second run of a body, returns the result of the first instead."""
    step = _STEP.get()
    if step is None:
        return run()
    if step.replayed is not None:
        return map_leaves(_new_leaf, next(step.replayed))
    with variable_set(_STEP, None):
        result = run()
    step.kept.append(result)
    return result


#: The recomputed body that is running, if any.
_STEP: ContextVar[TracedStep | None] = ContextVar("traced_step", default=None)


@contextmanager
def _autocast_of(ambient: Any) -> Iterator[None]:
    before = read_ambient()
    restore_autocast(ambient)
    try:
        yield
    finally:
        restore_autocast(before)


def _new_leaf(leaf: Any) -> Any:
    """The same tensor as a new leaf of autograd."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _never_unpacked(packed: Any) -> Tensor:
    raise AssertionError("the backward of a second run never runs")


class _EffectDetector(TorchDispatchMode):
    """Detects operators that use an RNG, mutate a tensor allocated outside, or are higher-order."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        #: The storages that operators inside have allocated, held so that their addresses are not reused.
        self._allocated: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.found = True
            return func(*args, **kwargs)
        mutated = (*mutated_by(func, args, kwargs), *updated_statistics(func, args, kwargs))
        self.found = self.found or may_use_rng(func) or any(map(self._is_from_outside, mutated))
        result = func(*args, **kwargs)
        if all(returned.alias_info is None for returned in func._schema.returns):
            for leaf in leaves_of(result):
                storage = _storage_of(leaf)
                if storage is not None:
                    self._allocated[storage._cdata] = storage
        return result

    def _is_from_outside(self, leaf: Any) -> bool:
        storage = _storage_of(leaf)
        return isinstance(leaf, Tensor) and (storage is None or storage._cdata not in self._allocated)


def _storage_of(leaf: Any) -> torch.UntypedStorage | None:
    try:
        return leaf.untyped_storage() if isinstance(leaf, Tensor) else None
    except (NotImplementedError, RuntimeError):  # A sparse tensor, or a subclass without a storage.
        return None
