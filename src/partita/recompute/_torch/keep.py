"""Kept segments of a recomputed body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import RecomputeError
from partita.recompute._torch.keep_records import (
    AutocastCasts,
    KeptDraws,
    OperatorRecord,
    WriteCopies,
    allocates_result,
    cast_by,
    generators_put_back,
    may_be_autocast,
    tensors_in,
    was_remembered,
    written_by,
)

__all__ = ["KeptResults", "keep_scope"]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# Results that a recomputed body keeps: noted while it first runs, and given back when it runs again.
#
# All of it below autograd: the second run builds the same history, but the kernels of what is kept do not run.


#: What a kept part runs in where a body is running now; each thread runs its own.
_RUNNING = threading.local()

_PartScope = Callable[[], AbstractContextManager[None]]


def keep_scope() -> AbstractContextManager[Any]:
    """Where results are kept if a body is running that will be recomputed; elsewhere it changes nothing.

    Inference tensors are never saved; a view of another tensor would lose its history there, in front of a mode.
    """
    scope: _PartScope | None = getattr(_RUNNING, "scope", None)
    return nullcontext() if scope is None or torch.is_inference_mode_enabled() else scope()


@final
class KeptResults:
    """What one run of a body keeps, part by part."""

    def __init__(self) -> None:
        self._parts: list[KeptPart] = []

    def noting(self) -> AbstractContextManager[None]:
        """While the body runs for the first time."""
        return _running(self._note_part)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """While it runs again. The random state of the caller is what it was before, whoever preserves it or not."""
        parts = iter(self._parts)
        devices = dict.fromkeys(device for part in self._parts for device in part.drawn_on())
        try:
            with generators_put_back(devices), _running(lambda: _given_back(next(parts, KeptPart()))):
                yield
        finally:
            # Behind the last result that the backward needs there may be parts that nobody has asked for.
            for part in self._parts:
                _let_go_if_over(part)

    @contextmanager
    def _note_part(self) -> Iterator[None]:
        part = KeptPart()
        self._parts.append(part)
        # Parts inside of a part are kept with it.
        with _running(None), part.noting():
            yield


@contextmanager
def _given_back(part: KeptPart) -> Iterator[None]:
    try:
        with _running(None), part.returning():
            yield
    finally:
        _let_go_if_over(part)


def _let_go_if_over(part: KeptPart) -> None:
    """Nobody holds what the backward has got, unless its graph is retained for another one."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        part.let_go()


@contextmanager
def _running(scope: _PartScope | None) -> Iterator[None]:
    before = getattr(_RUNNING, "scope", None)
    _RUNNING.scope = scope
    try:
        yield
    finally:
        _RUNNING.scope = before


# One part of a body that is kept: noted operator by operator when it first runs, and given back when it runs again.


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@final
class KeptPart:
    """What one part of a body gave in its first run, until it is let go of.

    From then on it is computed again, from the same random numbers: a backward that does not retain its graph must not
    hold what it has used, and another one may still come, from another result of the body.
    """

    def __init__(self) -> None:
        self._entries: Sequence[OperatorRecord] | None = ()
        self._draws = KeptDraws()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While the part runs for the first time."""
        self._entries = None  # Where it raises there is nothing to give back, and it will raise again.
        noting = _Noting(self._draws)
        with noting:
            yield
        self._entries = noting.closed()

    @contextmanager
    def returning(self) -> Iterator[None]:
        """While it runs again."""
        if self._entries is None:
            self._draws.make_again()
            yield
            return
        with _Returning(self._entries):
            yield
        self._draws.pass_over()

    def drawn_on(self) -> Iterable[torch.device]:
        """The devices whose generators the part has moved."""
        return self._draws.devices()

    def let_go(self) -> None:
        """What was kept is held no more."""
        self._entries = None


class _Keeping(TorchDispatchMode):
    """Sees each operator of a part that is kept, in both runs the same."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo is told of these files itself; torch would do so at each operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Autograd takes composite operators apart, and inference tensors pass it by; copies of them do not.
        if _is_composite(func) and any(tensor.is_inference() for tensor in tensors_in((args, kwargs))):
            with self:  # By torch's own kernel: decompositions in Python draw other random numbers.
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self.meet(func, args, kwargs)

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Noting(_Keeping):
    def __init__(self, draws: KeptDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._copies, self._casts = draws, WriteCopies(), AutocastCasts()
        self._entries: list[OperatorRecord] = []

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = written_by(func, args, kwargs)
        if written:
            _check_foreach(func, written)
            self._casts.before_writes(written)
        result = self._draws.noted(func, args, kwargs)
        if not allocates_result(func):
            self._copies.note_reader()
            return result
        self._casts.next_operator()
        entry = OperatorRecord(func, args, result, self._copies.of(written))
        self._entries.append(entry)
        self._copies.note(entry, written)
        if may_be_autocast(entry.cast):
            self._casts.note(entry, args[0], partial(func, *args, **kwargs))
            self._copies.note_reader()
        else:
            self._copies.note_kept(entry)
        return result

    def closed(self) -> Sequence[OperatorRecord]:
        """What is kept, when the part is over."""
        for entry in self._entries:
            entry.close()
        return self._entries


class _Returning(_Keeping):
    def __init__(self, entries: Sequence[OperatorRecord]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries
        self._next = 0

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        entry = self._entry_for(func, args) if allocates_result(func) else None
        if entry is None:
            return func(*args, **kwargs)
        return entry.given_back(written_by(func, args, kwargs))

    def _entry_for(self, func: Any, args: Any) -> OperatorRecord | None:
        """The entry of an operator, the next one; None where the operator runs again."""
        cast, entry = cast_by(func, args), self._peek()
        while cast is None and entry is not None and entry.is_made_again:
            self._next += 1  # Autocast remembers the cast in this run.
            entry = self._peek()
        if was_remembered(cast, entry):
            return None
        if entry is None or entry.operator is not func:
            raise RecomputeError(
                f"recomputation met {func} where the first run did not: the kept part of a body must do the same each "
                "time it runs"
            )
        self._next += 1
        return None if entry.is_made_again else entry

    def _peek(self) -> OperatorRecord | None:
        return self._entries[self._next] if self._next < len(self._entries) else None


def _check_foreach(func: Any, written: Iterable[Tensor]) -> None:
    """Raises where torch would lose gradients: in front of a mode, views do not learn that a foreach has written."""
    if "_foreach_" in str(func) and any(tensor._is_view() and tensor.requires_grad for tensor in written):
        raise RecomputeError(
            f"{func} writes to a view inside of what is kept, and torch loses its gradients there; do not keep it, or "
            "write to the tensors one by one"
        )


@cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
