"""Real tensors that a trace comes upon: those that are neither arguments nor in the state of the model.

The tracer works on stand-ins for arguments and state, but computes with the tensors themselves where it finds others,
so that a model which writes to one has changed it when the trace is over.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from partita._torch.schemas import Argument, signatures_of
from partita._torch.versions import version_of

__all__ = ["Constants", "is_only_traced"]


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
