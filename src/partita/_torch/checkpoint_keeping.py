"""Results that a recomputed body keeps: noted while it first runs, and given back when it runs again.

All of it below autograd: the second run builds the same history, but the kernels of what is kept do not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.schemas import storage_key, version_of
from partita.errors import RecomputeError

__all__ = ["KeptResults", "keep_scope"]

#: Which results are noted or given back where a body is running now; each thread runs its own.
_RUNNING = threading.local()


def keep_scope() -> AbstractContextManager[Any]:
    """Where results are kept if a body is running that will be recomputed; elsewhere it changes nothing.

    Inference tensors are never saved; a view of another tensor would lose its history there, in front of a mode.
    """
    mode: Callable[[], AbstractContextManager[Any]] | None = getattr(_RUNNING, "mode", None)
    return nullcontext() if mode is None or torch.is_inference_mode_enabled() else mode()


@final
class KeptResults:
    """What one run of a body keeps, in the order of the operators that made it."""

    def __init__(self) -> None:
        self._entries: list[_Entry | None] = []

    def noting(self) -> AbstractContextManager[None]:
        """While the body runs for the first time."""
        return _running(lambda: _Noting(self._entries))

    @contextmanager
    def returning(self) -> Iterator[None]:
        """While it runs again."""
        cursor = _Cursor(self._entries)
        with _running(lambda: _Returning(cursor)):
            yield


@contextmanager
def _running(mode: Callable[[], AbstractContextManager[Any]] | None) -> Iterator[None]:
    before = getattr(_RUNNING, "mode", None)
    _RUNNING.mode = mode
    try:
        yield
    finally:
        _RUNNING.mode = before


class _Entry:
    """What one operator gave and wrote, how often that had been written when the kept part was over, and generators."""

    __slots__ = ("generators", "operator", "result", "versions", "written")

    def __init__(self, operator: Any, result: Any, written: Sequence[Tensor]) -> None:
        self.operator = operator
        leaves, structure = pytree.tree_flatten(result)
        leaves[: _returned_writes(operator)] = [None] * _returned_writes(operator)
        kept = [_without_history(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.result = pytree.tree_unflatten(kept, structure)
        #: What it wrote to, None where that is kept anyway.
        self.written: list[Tensor | None] = list(map(_without_history, written))
        self.versions: list[int] = []
        #: After a draw, where the next one goes on: a draw that is not made again would leave it behind.
        self.generators = _generators((result, written)) if _draws(operator) else {}

    def close(self, kept: Collection[int]) -> None:
        """The kept part is over: writes so far belong to it, and those to other memory than `kept` are copied."""
        self.versions = [version_of(leaf) for leaf in _tensors(self.result)]
        self.written = [
            None if tensor is None or storage_key(tensor) in kept else tensor.clone() for tensor in self.written
        ]

    def check(self) -> None:
        if self.versions != [version_of(leaf) for leaf in _tensors(self.result)]:
            raise RecomputeError(
                f"a result of {self.operator} was kept for the backward and then changed in place, so it cannot be "
                "used again; keep something else, or write to a copy"
            )

    def given_back(self, written: Sequence[Tensor]) -> Any:
        """What the operator gives; `written` are the tensors that it was to write, and has written now."""
        for tensor, value in zip(written, self.written, strict=True):
            if value is not None:
                tensor.copy_(value)
        leaves, structure = pytree.tree_flatten(self.result)
        # A new tensor each time: autograd writes its history into what it is given.
        found = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        count = _returned_writes(self.operator)
        found[:count] = written[:count]
        return pytree.tree_unflatten(found, structure)


class _Cursor:
    """Where a run that is given results back has got to."""

    def __init__(self, entries: list[_Entry | None]) -> None:
        self._entries = entries
        self._next = 0

    def take(self, operator: Any) -> _Entry:
        """The result for the next operator; let go of, unless there may be another backward."""
        place = self._next
        entry = self._entries[place] if place < len(self._entries) else None
        if entry is None or entry.operator is not operator:
            raise RecomputeError(
                f"recomputation met {operator} where the first run did not: the kept part of a body must do the same "
                "each time it runs"
            )
        entry.check()
        for device, state in entry.generators.items():
            _module_of(device).set_rng_state(state, *_index_of(device))
        self._next += 1
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._entries[place] = None
        return entry


class _Keeping(TorchDispatchMode):
    """Sees each operator of a part that is kept; parts inside of it are kept with it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._outside = _running(None)
        self._outside.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._outside.__exit__(None, None, None)


class _Noting(_Keeping):
    def __init__(self, entries: list[_Entry | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries
        self._own: list[_Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func) and not _may_be_cached(func, args):
            self._own.append(_Entry(func, result, _written(func, args, kwargs or {})))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        kept = {storage_key(tensor) for entry in self._own for tensor in _tensors(entry.result)}
        for entry in self._own:
            entry.close(kept)
        self._entries += self._own


class _Returning(_Keeping):
    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cursor = cursor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func) or _may_be_cached(func, args):
            return func(*args, **(kwargs or {}))
        return self._cursor.take(func).given_back(_written(func, args, kwargs or {}))


def _without_history(tensor: Tensor) -> Tensor:
    """The same memory under another tensor; a write to one counts for both, which below autograd has to be said."""
    if tensor.is_inference():
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@cache
def _is_kept(func: Any) -> bool:
    """Whether the results of an operator are kept.

    A view is made again, since it would keep what it looks at, and so are shapes changed in place (`t_`): the tensor
    that stands for what is kept has the shape from before.
    """
    if func in _NOT_KEPT or torch.Tag.inplace_view in getattr(func, "tags", ()):
        return False
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return not any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _may_be_cached(func: Any, args: Any) -> bool:
    """Whether this may be the cast of a weight, which autocast remembers, so that it runs in one of the runs only."""
    return func is torch.ops.aten._to_copy.default and bool(args[0].requires_grad)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes, as far as its schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(given)


@cache
def _returned_writes(func: Any) -> int:
    """How many of the first results of an operator are the tensors themselves that it wrote."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return sum(result.alias_info is not None and result.alias_info.is_write for result in returns)


def _draws(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _generators(result: Any) -> dict[torch.device, Tensor]:
    """The states of the default generators of the devices that hold a result."""
    devices = {tensor.device for tensor in _tensors(result)}
    return {
        device: _module_of(device).get_rng_state(*_index_of(device)) for device in devices if _has_generator(device)
    }


def _has_generator(device: torch.device) -> bool:
    return hasattr(_module_of(device), "get_rng_state") if device.type != "meta" else False


def _module_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


#: What autograd and its hooks call beside the operators of a body, and not equally often in each run.
_NOT_KEPT: frozenset[Any] = frozenset(getattr(checkpoint, "SAC_IGNORED_OPS", ())) | {torch.ops.aten.detach.default}
