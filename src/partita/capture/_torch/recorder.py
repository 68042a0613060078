"""The recorder of one export: toggles, modes per node, lifted constants."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from partita._torch import toggles
from partita._torch.operators.schemas import Argument, signatures_of
from partita._torch.tensors import version_of

__all__ = ["Constants", "Recorder", "Seen", "current_recorder", "is_only_traced", "listening_recorder", "recording"]


# The recorder of one trace: writes toggles into the graph that is being traced, and remembers what it saw.
#
# Torch's tracer notes that the grad mode was set to True, not that a block was left and put back what was there. So
# the context managers are told apart while they run, and each writes the toggles that say what it means.


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


# Real tensors that a trace comes upon: those that are neither arguments nor in the state of the model.
#
# The tracer works on stand-ins for arguments and state, but computes with the tensors themselves where it finds
# others, so that a model which writes to one has changed it when the trace is over.


class Constants:
    """The tensors that one trace has come upon, with what was in those that it may have written to."""

    def __init__(self) -> None:
        self.found: dict[int, _Found] = {}
        #: Whether one of them has gradients: a program has such tensors without.
        self.has_lost_gradients = False
        #: By node that may give one of them, or a view of it: which.
        self._given: dict[Node, tuple[_Found, ...]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """In the order in which they were met."""
        return [found.tensor for found in self.found.values()]

    def meet(self, node: Node, constant: Any) -> None:
        """Takes note of a tensor that a node reads."""
        # Subclasses are stand-ins of the tracer, or wrap one.
        if type(constant) not in (Tensor, Parameter) or is_wrapped(constant):
            return
        self.has_lost_gradients |= constant.requires_grad and torch.is_grad_enabled()
        found = self.found.setdefault(id(constant), _Found(constant, version_of(constant)))
        self._given[node] = (found,)

    def pass_on(self, node: Node) -> None:
        """Takes note of an operator that is about to run: it may write to what it is given, or give a view of it."""
        if not self._given or node.op != "call_function":
            return
        written, shared = _written_and_shared(node)
        for found in self._reached(written):
            found.keep()
        given = self._reached(shared)
        if given:
            self._given[node] = given

    def restore(self) -> None:
        """Puts back what was in the tensors that the trace has written to."""
        for found in self.found.values():
            found.restore()

    def _reached(self, nodes: Iterable[Node]) -> tuple[_Found, ...]:
        return tuple(found for node in nodes for found in self._given.get(node, ()))


@dataclass(slots=True)
class _Found:
    """One tensor; it may be large, so it is copied only if something is about to write to it."""

    tensor: Tensor
    version: int | None
    before: Tensor | None = None

    def keep(self) -> None:
        from torch.utils._python_dispatch import _disable_current_modes

        if self.before is None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.before = self.tensor.detach().clone()

    def restore(self) -> None:
        if self.before is not None and version_of(self.tensor) != self.version:
            self.tensor.detach().copy_(self.before)


def _written_and_shared(node: Node) -> tuple[list[Node], list[Node]]:
    """The inputs that an operator writes to, and those that its result may be a view of."""
    signatures = signatures_of(node.target)
    if node.target is operator.getitem or not signatures:
        # An item is part of what it is taken from; what operators with bodies do is not declared.
        return [] if node.target is operator.getitem else node.all_input_nodes, node.all_input_nodes
    written: list[Node] = []
    shared: list[Node] = []
    for argument in signatures[0].arguments:
        given = _nodes_in(_given(node, argument))
        written += given if argument.written else ()
        shared += given if argument.shared else ()
    return written, shared


def _given(node: Node, argument: Argument) -> Any:
    if 0 <= argument.position < len(node.args):
        return node.args[argument.position]
    return node.kwargs.get(argument.name)


def _nodes_in(value: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]


def is_only_traced(tensors: Iterable[object]) -> bool:
    """Whether any of these tensors has no values, or belongs to a transform of torch.func that is over."""
    return any(
        isinstance(tensor, FakeTensor) or (isinstance(tensor, Tensor) and is_wrapped(tensor)) for tensor in tensors
    )
