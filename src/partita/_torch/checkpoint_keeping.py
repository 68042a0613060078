"""Results that a recomputed body keeps: noted while it first runs, and given back when it runs again.

All of it below autograd: the second run builds the same history, but the kernels of what is kept do not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch

from partita._torch.checkpoint_keep_draws import generators_put_back
from partita._torch.checkpoint_keep_parts import KeptPart

__all__ = ["KeptResults", "keep_scope"]

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
