"""Calls of a body as compiled code sees them: what is in containers, and the state of modules, as own values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.fx import GraphModule

from partita._torch.lowering_containers import LEAF, Shape, leaves_of, shape_of
from partita.runtime.module_state import ModuleState
from partita.runtime.signature import Call

__all__ = ["Calls"]


@final
class Calls:
    """Makes calls of inputs; most bodies call no modules and get no containers, and then the inputs are the values."""

    def __init__(self, body: GraphModule) -> None:
        self._body = body
        self._state = ModuleState(body)
        self._has_modules = bool(self._state)
        self._leaves = (LEAF,) * len(body.graph.find_nodes(op="placeholder"))
        self._has_containers = False

    def of(self, inputs: Sequence[Any]) -> Call:
        """The call with these inputs."""
        if not self._has_containers and not self._has_modules:
            return Call(inputs, self._leaves)
        shapes: tuple[Shape, ...] = self._leaves
        values: Sequence[Any] = inputs
        if self._has_containers:
            shapes = tuple(map(shape_of, inputs))
            values = [leaf for value, shape in zip(inputs, shapes, strict=True) for leaf in leaves_of(value, shape)]
        if not self._has_modules:
            return Call(values, shapes)
        state = self._state
        if not state.is_current():
            state = self._state = ModuleState(self._body)
        return Call((*values, *state.read()), shapes, state.look())

    def taken_apart(self, call: Call) -> Call:
        """The same call without the containers among its values; all calls are taken apart from now on."""
        if self._has_containers or not any(isinstance(value, tuple | list | dict) for value in call.values):
            return call
        self._has_containers = True
        return self.of(call.values[: len(self._leaves)])
