"""Calls of a body as compiled code sees them: what is in containers, and the state of modules, as own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        self.state = ModuleState(body)
        self._leaves = (LEAF,) * len(body.graph.find_nodes(op="placeholder"))
        self._has_containers = False

    def of(self, inputs: Sequence[Any]) -> Call:
        """The call with these inputs."""
        if not self._has_containers and not self.state:
            return Call(inputs, self._leaves)
        if not self.state.is_current:
            self.state = ModuleState(self._body)
        shapes: tuple[Shape, ...] = self._leaves
        values: Sequence[Any] = inputs
        if self._has_containers:
            shapes = tuple(map(shape_of, inputs))
            values = [leaf for value, shape in zip(inputs, shapes, strict=True) for leaf in leaves_of(value, shape)]
        return Call((*values, *self.state.read()), shapes, self.state.training)

    def taken_apart(self, call: Call) -> Call:
        """The same call without the containers among its values; all calls are taken apart from now on."""
        if self._has_containers or not any(isinstance(value, tuple | list | dict) for value in call.values):
            return call
        self._has_containers = True
        return self.of(call.values[: len(self._leaves)])

    def state_that_may_be_written(self, call: Call) -> Iterator[int]:
        """The places of what modules may write: anything but parameters."""
        slots = enumerate(self.state.slots, len(call.values) - len(self.state.slots))
        return (place for place, slot in slots if slot.table != "_parameters")
