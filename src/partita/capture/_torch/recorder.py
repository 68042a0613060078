"""The recorder of one export: it writes toggles into the traced graph, and records modes, mode queries and constants.

Torch's tracer records that the grad mode was set to True, not that a block was left and restored the previous mode. So
each context manager reports to the recorder, which writes the toggles that say what it means.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import debug_unwrap
from torch.fx import Node
from torch.nn import Parameter

from partita._torch import toggles
from partita._torch.fake_tensors import fake_mode_of
from partita._torch.modes import variable_set
from partita._torch.operator_schemas import Argument, signatures_of
from partita._torch.pytrees import leaves_of
from partita._torch.tensors import version_of


@dataclass(frozen=True, slots=True)
class Seen:
    """The modes of the thread when a node was written, as torch reports them."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


class Recorder:
    """The record of one trace; `reports_autocast` is the answer when the model queries the autocast of its caller."""

    def __init__(self, *, reports_autocast: bool = False) -> None:
        self.reports_autocast = reports_autocast
        #: Whether the model queries modes of its caller.
        self.queries_grad = False
        self.queries_autocast = False
        #: Whether the model sets the grad mode to a value, which may come from its caller.
        self.sets_grad_by_value = False
        #: The modes that each node was written under.
        self.seen: dict[Node, Seen] = {}
        #: What no graph can express.
        self.problems: list[str] = []
        #: By block: the node that queries the previous mode, or the one that entered the block.
        self.handles: WeakKeyDictionary[Any, Node] = WeakKeyDictionary()
        #: How many autocast blocks are open, by device, and the modes of the open inference blocks.
        self.open_autocasts: Counter[str] = Counter()
        self.open_inference: list[bool] = []
        #: How many calls of `torch.utils.checkpoint` were traced, and the number of the one that is running.
        self.checkpoints = 0
        self.checkpoint: int | None = None
        #: Tensors that are neither arguments nor state.
        self.constants = Constants()
        self.is_silent = False

    @property
    def depends_on_callers_grad(self) -> bool:
        """Whether the model may behave differently if its caller has gradients off."""
        return self.queries_grad or self.sets_grad_by_value

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Inside, modes are switched without writing a toggle."""
        was_silent, self.is_silent = self.is_silent, True
        try:
            with torch.DisableTorchFunction():
                yield
        finally:
            self.is_silent = was_silent

    def write(self, toggle: Any, *arguments: Any) -> Node | None:
        """Appends a toggle to the graph that is being traced; None, and a problem, if it has no place there."""
        tracer = _tracer()
        if tracer is None:
            self.problems.append("a block that the model enters is left after the model has returned")
            return None
        if any(isinstance(argument, Node) and argument.graph is not tracer.graph for argument in arguments):
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
    """The recorder to report a mode switch to; None in other threads, outside of traces, and where it is silenced."""
    recorder = _CURRENT.get()
    return None if recorder is None or recorder.is_silent or _tracer() is None else recorder


def recording(recorder: Recorder) -> AbstractContextManager[None]:
    """Inside, in this thread, every mode switch is reported to `recorder`."""
    return variable_set(_CURRENT, recorder)


def _tracer() -> Any:
    """The tracer whose graph the next operator would be written to, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


class Constants:
    """The real tensors that a trace reads: those that are neither arguments nor in the state of the model.

    The tracer replaces arguments and state by fake tensors, but computes with these themselves. So a model that mutates
    one has done so when the trace is over, unless it is restored.
    """

    def __init__(self) -> None:
        self.found: dict[int, _Found] = {}
        #: Whether one of them has gradients: a program has such tensors without.
        self.has_lost_gradients = False
        #: By node that may return some of them, or views of them: which.
        self._aliased: dict[Node, tuple[_Found, ...]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """In the order in which they were first read."""
        return [found.tensor for found in self.found.values()]

    def on_constant(self, node: Node, constant: Any) -> None:
        """Records a tensor that a node reads."""
        # Subclasses are fake tensors of the tracer, or wrap one.
        if type(constant) not in (Tensor, Parameter) or _is_wrapped(constant):
            return
        self.has_lost_gradients |= constant.requires_grad and torch.is_grad_enabled()
        found = self.found.setdefault(id(constant), _Found(constant, version_of(constant)))
        self._aliased[node] = (found,)

    def on_operator(self, node: Node) -> None:
        """Records an operator that is about to run: it may mutate its arguments, or return views of them."""
        if not self._aliased or node.op != "call_function":
            return
        mutated, viewed = _mutated_and_viewed(node)
        for found in self._reached(mutated):
            found.back_up()
        aliased = self._reached(viewed)
        if aliased:
            self._aliased[node] = aliased

    def restore(self) -> None:
        """Restores the tensors that the trace has mutated."""
        for found in self.found.values():
            found.restore()

    def _reached(self, nodes: Iterable[Node]) -> tuple[_Found, ...]:
        return tuple(found for node in nodes for found in self._aliased.get(node, ()))


@dataclass(slots=True)
class _Found:
    """One tensor; it may be large, so it is copied only when an operator is about to mutate it."""

    tensor: Tensor
    version: int | None
    before: Tensor | None = None

    def back_up(self) -> None:
        from torch.utils._python_dispatch import _disable_current_modes

        if self.before is None:
            with _disable_current_modes(), torch.DisableTorchFunction():
                self.before = self.tensor.detach().clone()

    def restore(self) -> None:
        if self.before is not None and version_of(self.tensor) != self.version:
            self.tensor.detach().copy_(self.before)


def _mutated_and_viewed(node: Node) -> tuple[list[Node], list[Node]]:
    """The inputs that an operator mutates, and those that its result may be a view of."""
    signatures = signatures_of(node.target)
    if node.target is operator.getitem or not signatures:
        # An item aliases its container; operators with bodies declare no effects.
        return [] if node.target is operator.getitem else node.all_input_nodes, node.all_input_nodes
    mutated: list[Node] = []
    viewed: list[Node] = []
    for argument in signatures[0].arguments:
        nodes = [leaf for leaf in leaves_of(_value_of(node, argument)) if isinstance(leaf, Node)]
        mutated += nodes if argument.mutated else ()
        viewed += nodes if argument.aliased else ()
    return mutated, viewed


def _value_of(node: Node, argument: Argument) -> Any:
    if 0 <= argument.position < len(node.args):
        return node.args[argument.position]
    return node.kwargs.get(argument.name)


def is_only_traced(tensors: Iterable[object]) -> bool:
    """Whether any of these tensors is fake, or belongs to a transform of torch.func that has ended."""
    return any(
        isinstance(tensor, Tensor) and (fake_mode_of(tensor) is not None or _is_wrapped(tensor)) for tensor in tensors
    )


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of torch.func has wrapped the tensor."""
    return debug_unwrap(tensor, recurse=False) is not tensor
