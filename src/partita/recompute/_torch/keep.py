"""Kept segments of a recomputed body: recorded operator by operator in the first run, and replayed in later ones.

This happens below autograd: a later run builds the same history, but the kernels of kept operators do not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.operator_schemas import is_composite
from partita._torch.pytrees import tensors_in
from partita.errors import RecomputeError
from partita.recompute._torch.keep_records import (
    AutocastCasts,
    MutationCopies,
    OperatorRecord,
    RngStates,
    allocates_result,
    cast_by,
    may_be_autocast,
    mutated_by,
    rng_state_restored,
    was_cached,
)

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True

#: The scope of kept segments in the body that is running in this thread.
_RUNNING = threading.local()

_SegmentScope = Callable[[], AbstractContextManager[None]]


def keep_scope() -> AbstractContextManager[Any]:
    """The context in which the results of a recomputed body are kept; trivial where no such body is running.

    Inference tensors are never saved; a view would lose its history under a dispatch mode in inference mode.
    """
    scope: _SegmentScope | None = getattr(_RUNNING, "scope", None)
    return nullcontext() if scope is None or torch.is_inference_mode_enabled() else scope()


@final
class KeptResults:
    """What one run of a body keeps, segment by segment."""

    def __init__(self) -> None:
        self._segments: list[KeptSegment] = []

    def recording(self) -> AbstractContextManager[None]:
        """The context of the first run of the body."""
        return _running(self._record_segment)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The context of later runs. They leave the RNG state of the caller unchanged."""
        segments = iter(self._segments)
        devices = dict.fromkeys(device for segment in self._segments for device in segment.rng_devices())
        try:
            with rng_state_restored(devices), _running(lambda: _replayed(next(segments, KeptSegment()))):
                yield
        finally:
            # A run stops at the last result that the backward needs, so it may not reach all segments.
            for segment in self._segments:
                _release_unless_retained(segment)

    @contextmanager
    def _record_segment(self) -> Iterator[None]:
        segment = KeptSegment()
        self._segments.append(segment)
        # Nested segments are kept with the outer one.
        with _running(None), segment.recording():
            yield


@contextmanager
def _replayed(segment: KeptSegment) -> Iterator[None]:
    try:
        with _running(None), segment.replaying():
            yield
    finally:
        _release_unless_retained(segment)


def _release_unless_retained(segment: KeptSegment) -> None:
    """Releases what the backward has used, unless its graph is retained for another one."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        segment.release()


@contextmanager
def _running(scope: _SegmentScope | None) -> Iterator[None]:
    before = getattr(_RUNNING, "scope", None)
    _RUNNING.scope = scope
    try:
        yield
    finally:
        _RUNNING.scope = before


_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


@final
class KeptSegment:
    """The results of one segment of a body in its first run, until they are released.

    From then on it is recomputed, with the same random numbers: a backward that does not retain its graph must release
    what it has used, and another one may follow, from another result of the body.
    """

    def __init__(self) -> None:
        self._records: Sequence[OperatorRecord] | None = ()
        self._rng = RngStates()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the first run."""
        self._records = None  # Where it raises there is nothing to replay, and it will raise again.
        recording = _Recording(self._rng)
        with recording:
            yield
        self._records = recording.closed()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The context of later runs."""
        if self._records is None:
            self._rng.rewind()
            yield
            return
        with _Replaying(self._records):
            yield
        self._rng.skip()

    def rng_devices(self) -> Iterable[torch.device]:
        """The devices whose RNG state the segment has advanced."""
        return self._rng.devices()

    def release(self) -> None:
        """Releases the kept results."""
        self._records = None


class _KeepMode(TorchDispatchMode):
    """Intercepts the operators of a kept segment, the same ones in both runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo already skips this module; torch would mark each operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Autograd decomposes composite operators, but inference tensors bypass it, unlike the copies of a later run.
        if is_composite(func) and any(tensor.is_inference() for tensor in tensors_in((args, kwargs))):
            with self:  # By torch's own kernel: Python decompositions generate other random numbers.
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self.on_operator(func, args, kwargs)

    def on_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Recording(_KeepMode):
    def __init__(self, rng: RngStates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng, self._copies, self._casts = rng, MutationCopies(), AutocastCasts()
        self._records: list[OperatorRecord] = []

    def on_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        mutated = mutated_by(func, args, kwargs)
        if mutated:
            _check_foreach(func, mutated)
            self._casts.before_mutation(mutated)
        result = self._rng.recorded(func, args, kwargs)
        if not allocates_result(func):
            self._copies.add_reader()
            return result
        self._casts.next_operator()
        record = OperatorRecord(func, args, result, self._copies.of(mutated))
        self._records.append(record)
        self._copies.add(record, mutated)
        if may_be_autocast(record.cast):
            self._casts.add(record, args[0], partial(func, *args, **kwargs))
            self._copies.add_reader()
        else:
            self._copies.add_kept(record)
        return result

    def closed(self) -> Sequence[OperatorRecord]:
        """The records, at the end of the segment."""
        for record in self._records:
            record.close()
        return self._records


class _Replaying(_KeepMode):
    def __init__(self, records: Sequence[OperatorRecord]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records = records
        self._next = 0

    def on_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        record = self._record_for(func, args) if allocates_result(func) else None
        if record is None:
            return func(*args, **kwargs)
        return record.replay(mutated_by(func, args, kwargs))

    def _record_for(self, func: Any, args: Any) -> OperatorRecord | None:
        """The next record, which must be of this operator; None where the operator is recomputed."""
        cast, record = cast_by(func, args), self._peek()
        while cast is None and record is not None and record.is_recomputed:
            self._next += 1  # Autocast has the cast in its cache in this run.
            record = self._peek()
        if was_cached(cast, record):
            return None
        if record is None or record.operator is not func:
            raise RecomputeError(
                f"recomputation met {func} where the first run did not: a kept segment must run the same operators "
                "each time"
            )
        self._next += 1
        return None if record.is_recomputed else record

    def _peek(self) -> OperatorRecord | None:
        return self._records[self._next] if self._next < len(self._records) else None


def _check_foreach(func: Any, mutated: Iterable[Tensor]) -> None:
    """Raises where torch would lose gradients: under a dispatch mode, a foreach does not update views it mutates."""
    if "_foreach_" in str(func) and any(tensor._is_view() and tensor.requires_grad for tensor in mutated):
        raise RecomputeError(
            f"{func} mutates a view in a kept segment, and torch loses its gradients there; do not keep it, or mutate "
            "the tensors one by one"
        )
