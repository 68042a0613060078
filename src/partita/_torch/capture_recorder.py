"""The recorder of one trace: writes toggles into the graph that is being traced, and remembers what it saw.

Torch's tracer notes that the grad mode was set to True, not that a block was left and put back what was there. So the
context managers are told apart while they run, and each writes the toggles that say what it means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from partita._torch import toggles
from partita._torch.capture_constants import Constants

__all__ = ["Recorder", "Seen", "current_recorder", "listening_recorder", "recording"]


@dataclass(frozen=True, slots=True)
class Seen:
    """The modes of the thread when a node was written, as torch itself tells them."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


class Recorder:
    """What one trace of a model has shown so far; `says_autocast` is what a model is told of its caller's autocast."""

    def __init__(self, *, says_autocast: bool = False) -> None:
        self.says_autocast = says_autocast
        #: Whether the model asks for modes of its caller.
        self.asks_for_grad = False
        self.asks_for_autocast = False
        #: Whether the model sets the grad mode to values, which it may have from its caller.
        self.sets_grad_by_value = False
        #: The modes that each node was written under.
        self.seen: dict[Node, Seen] = {}
        #: What cannot be written down.
        self.problems: list[str] = []
        #: By block: the node that asks what was there before, or the one that entered it.
        self.handles: WeakKeyDictionary[Any, Node] = WeakKeyDictionary()
        #: How many autocast blocks are open, by device, and the modes of the open inference blocks.
        self.open_autocasts: Counter[str] = Counter()
        self.open_inference: list[bool] = []
        #: Tensors that are neither arguments nor state.
        self.constants = Constants()
        self._silent = False

    @property
    def hangs_on_callers_grad(self) -> bool:
        """Whether the model may do something else if its caller has gradients off."""
        return self.asks_for_grad or self.sets_grad_by_value

    @property
    def hangs_on_caller(self) -> bool:
        """Whether the model may do something else under other modes of its caller."""
        return self.asks_for_autocast or self.hangs_on_callers_grad

    @property
    def is_listening(self) -> bool:
        """Whether a switch belongs in the graph: a model is being traced, and it is not this recorder that switches."""
        return not self._silent and _tracer() is not None

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside, modes are switched for real, with no toggle for it in the graph."""
        was_silent, self._silent = self._silent, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._silent = was_silent

    def write(self, toggle: Any, *arguments: Any) -> Node | None:
        """Appends a toggle to the graph that is being traced; None, and a problem, if it has no place there."""
        tracer = _tracer()
        if tracer is None:
            self.problems.append("a block that the model enters is left after the model has returned")
            return None
        if any(isinstance(given, Node) and given.graph is not tracer.graph for given in arguments):
            self.problems.append("a block is entered outside the body of an operator and left inside it")
            return None
        node: Node = tracer.create_node("call_function", toggle, arguments, {})
        node.meta["val"] = None
        return node

    def set_grad(self, enabled: bool) -> None:  # noqa: FBT001
        """Sets the grad mode to a value that the model has computed."""
        with self.silence():
            torch._C._set_grad_enabled(enabled)
        self.sets_grad_by_value = True
        self.write(toggles.SET_GRAD, enabled)


_CURRENT: ContextVar[Recorder | None] = ContextVar("partita_recorder", default=None)


def current_recorder() -> Recorder | None:
    """The recorder of the capture that this thread is in."""
    return _CURRENT.get()


def listening_recorder() -> Recorder | None:
    """The recorder that wants to know of a switch made here and now; None in other threads and outside of traces."""
    recorder = _CURRENT.get()
    return recorder if recorder is not None and recorder.is_listening else None


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, in this thread, `recorder` hears of every switch."""
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _tracer() -> Any:
    """The tracer whose graph the next operator would be written to, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer
