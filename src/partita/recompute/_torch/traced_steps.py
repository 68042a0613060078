"""Recomputed bodies in a training step that is traced whole: the operators of a body occur again in its backward.

A step that `make_fx` traces holds its backward too, and no partitioner comes after it. What the backward needs of a
body is computed again while the backward is traced. A body that draws random numbers, or mutates what it did not make,
cannot be written down twice; its results are used as they are.
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
from torch.utils._pytree import tree_leaves, tree_map

from partita._torch.fake_sandbox import traces_after_dispatch
from partita._torch.modes import read_ambient, restore_autocast
from partita._torch.tensors import version_of
from partita.errors import RecomputeError
from partita.hops._torch.body import run_body

__all__ = ["TracedStep", "run_kept_in_step", "traces_whole_step"]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


def traces_whole_step() -> bool:
    """Whether `make_fx` traces what runs, backward included, and not AOTAutograd, whose partitioner reads tags."""
    return traces_after_dispatch() and TracingContext.try_get() is None


@final
class TracedStep:
    """One body in such a step; the backward asks for what autograd has saved of it by number."""

    def __init__(
        self,
        body: Callable[..., Any],
        operands: tuple[Any, ...],
        keywords: Mapping[str, Any],
        again: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._call = (body, operands, keywords)
        leaves = [leaf for leaf in tree_leaves((operands, dict(keywords))) if isinstance(leaf, Tensor)]
        self._given = frozenset(map(id, leaves))
        state = (*body.parameters(), *body.buffers()) if isinstance(body, nn.Module) else ()
        self._read = [_Held(tensor) for tensor in (*leaves, *state)]
        self._again = again
        self._ambient = read_ambient()
        self._watch = _Effects()
        self._saved: list[_Held] = []
        self._recomputed: list[Tensor] | None = None
        self.kept: list[Any] = []
        #: While it runs again: the kept results that come next.
        self.returned: Iterator[Any] | None = None

    def first(self) -> Any:
        """What the body gives."""
        body, operands, keywords = self._call
        with _running(self), self._watch, saved_tensors_hooks(self._pack, self._unpack):
            return run_body(nullcontext(), body, operands, keywords)

    def _pack(self, tensor: Tensor) -> Any:
        if id(tensor) in self._given or _STEP.get() is not self:  # An input, or inside of what is kept.
            return _Held(tensor)
        self._saved.append(_Held(tensor))
        return len(self._saved) - 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Held):
            return packed.as_saved()
        number: int = packed
        saved = self._saved[number].as_saved()
        if self._recomputed is None and not self._watch.seen and not any(held.is_changed for held in self._read):
            self._recomputed = self._run_again()
        return self._recomputed[number] if self._recomputed else saved

    def _run_again(self) -> list[Tensor]:
        """What autograd saves when the body runs once more, in the order of the first run; nothing if it differs."""
        body, operands, keywords = self._call
        swapped: dict[int, Tensor] = {}

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in swapped:
                swapped[id(leaf)] = _as_given(leaf)
            return swapped[id(leaf)]

        operands, keywords = tree_map(fresh, (operands, dict(keywords)))
        given, found = {id(tensor) for tensor in swapped.values()}, list[Tensor]()

        def pack(tensor: Tensor) -> None:
            if id(tensor) not in given and _STEP.get() is self:
                found.append(tensor.detach())
                if len(found) == len(self._saved):
                    raise _AllIsThereError

        self.returned = iter(self.kept)
        try:
            with (
                _running(self),
                _autocast_of(self._ambient),
                torch.enable_grad(),
                self._again or nullcontext(),
                saved_tensors_hooks(pack, _never_unpacked),
            ):
                run_body(nullcontext(), body, operands, keywords)
        except _AllIsThereError:
            pass  # What the body does after the last result that is needed would be dead code.
        finally:
            self.returned = None
        return found if list(map(_kind, found)) == [_kind(held.tensor) for held in self._saved] else []


@final
class _Held:
    """A tensor as it was when it was saved or given."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, version_of(tensor)

    @property
    def is_changed(self) -> bool:
        return version_of(self.tensor) != self._version

    def as_saved(self) -> Tensor:
        if self.is_changed:
            raise RecomputeError(
                "a tensor that the backward of a checkpoint needs was changed in place after it was saved; plain "
                "autograd refuses that too: write to a copy"
            )
        return self.tensor


class _AllIsThereError(Exception):
    """Ends a second run."""


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.dim()


def run_kept_in_step(run: Callable[[], Any]) -> Any:
    """What `run` gives; where a body runs again, what it gave the first time."""
    step = _STEP.get()
    if step is None:
        return run()
    if step.returned is not None:
        return tree_map(_as_given, next(step.returned))
    with _running(None):
        result = run()
    step.kept.append(result)
    return result


#: The body that is running, if it is one of a step.
_STEP: ContextVar[TracedStep | None] = ContextVar("traced_step", default=None)


@contextmanager
def _running(step: TracedStep | None) -> Iterator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


@contextmanager
def _autocast_of(ambient: Any) -> Iterator[None]:
    before = read_ambient()
    restore_autocast(ambient)
    try:
        yield
    finally:
        restore_autocast(before)


def _as_given(leaf: Any) -> Any:
    """A tensor as the start of a new history."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _never_unpacked(packed: Any) -> Tensor:
    raise AssertionError("nobody runs the backward of a second run")


class _Effects(TorchDispatchMode):
    """Notes whether an operator draws, mutates a tensor that was there before, or runs a body of its own."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        #: The memory that operators inside have allocated, held so that no other gets its address.
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.seen = True
            return func(*args, **kwargs)
        self.seen = self.seen or _may_draw(func) or any(map(self._was_there, _written(func, args, kwargs)))
        result = func(*args, **kwargs)
        if all(returned.alias_info is None for returned in func._schema.returns):
            for leaf in tree_leaves(result):
                storage = _storage_of(leaf)
                if storage is not None:
                    self._made[storage._cdata] = storage
        return result

    def _was_there(self, leaf: Any) -> bool:
        storage = _storage_of(leaf)
        return isinstance(leaf, Tensor) and (storage is None or storage._cdata not in self._made)


def _may_draw(func: OpOverload) -> bool:
    """Whether an operator draws; one of somebody else's may do so without saying it."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _OF_TORCH


def _written(func: OpOverload, args: Any, kwargs: Any) -> Iterator[Any]:
    """What a call mutates, statistics of a norm in training included, of which schemas say nothing."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    trains = given.get("training", given.get("train", True))
    for argument in func._schema.arguments:
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or (trains and argument.name in ("running_mean", "running_var")):
            yield from tree_leaves(given.get(argument.name))


def _storage_of(leaf: Any) -> torch.UntypedStorage | None:
    try:
        return leaf.untyped_storage() if isinstance(leaf, Tensor) else None
    except (NotImplementedError, RuntimeError):  # A sparse tensor, or a subclass without memory of its own.
        return None


_OF_TORCH = frozenset(("aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd"))
