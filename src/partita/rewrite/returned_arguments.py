"""Returned arguments: nodes whose result is one of their arguments itself, not a copy nor a view of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.dry_runs import Allowance, Guard, is_of_level
from partita._torch.schemas import is_higher_order
from partita._torch.stage import Look, Stage, tensors_in
from partita.errors import ModeError
from partita.graphs.behaviour_terms import nodes_in_slots
from partita.graphs.behaviours import Behaviours
from partita.graphs.program import Program
from partita.graphs.projections import takes_item
from partita.graphs.values import value_of
from partita.rewrite.traced_values import call_with, has_value, nodes_read, value_read

__all__ = ["ReturnedArguments"]


class ReturnedArguments:
    """Asks nodes on fake tensors, and only those that may return what they are given; `stage` must be open."""

    def __init__(self, program: Program, stage: Stage) -> None:
        self._program, self._stage = program, stage
        self._behaviours = Behaviours(program.graph_module, program.pure)
        self._known: dict[Node, dict[int | None, Node]] = {}
        self._aliasing = self._behaviours.aliasing(program.graph)
        self._allowance = Allowance(_CALLS + _CALLS_BY_NODE * len(program.index.nodes))

    def of(self, node: Node) -> dict[int | None, Node]:
        """The nodes that give the result of `node`, by item where the result is a container, else under None."""
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def written_by(self, node: Node) -> frozenset[Node]:
        """The nodes whose tensors `node` may write."""
        told = self._behaviours.of(node)
        return frozenset(nodes_in_slots(node, told.writes)) if told.writes else frozenset()

    def check_writing(self, node: Node) -> None:
        """Raises where `node` gives a tensor another shape, which an alias of the tensor would not see."""
        written = self.written_by(node)
        read = nodes_read(node)
        fakes = [self._stage.copy(value_read(self._program, given)) for given in read]
        before = [Look.of(tensor) for tensor in tensors_in(fakes)]
        with torch.no_grad():
            self._attempt(node, fakes)
        if before != [Look.of(tensor) for tensor in tensors_in(fakes)]:
            names = ", ".join(sorted(repr(given.name) for given in written))
            raise ModeError(
                f"node {node.name!r} changes the shape or the storage of {names} in place where no gradients are "
                "recorded, which no plain operator can do to a tensor that has gradients; use the out-of-place form"
            )

    def _found(self, node: Node) -> dict[int | None, Node]:
        if takes_item(node, self._program.graph_module):
            container, item = node.args
            source = self.of(container).get(item)  # type: ignore[arg-type]
            return {} if source is None else {None: source}
        if node not in self._aliasing or (node.op == "call_function" and _is_more_than_a_call(node.target)):
            return {}
        read = nodes_read(node)
        values = [value_read(self._program, given) for given in read]
        if has_value(node) and not _look_alike(value_of(node), values):
            return {}
        return self._asked(node, read, values)

    def _asked(self, node: Node, read: list[Node], values: list[Any]) -> dict[int | None, Node]:
        fakes = [self._stage.copy(value) for value in values]
        with torch.no_grad():
            result = self._attempt(node, fakes)
        given = {id(fake): source for source, fake in zip(read, fakes, strict=True) if isinstance(fake, Tensor)}
        if isinstance(result, Tensor):
            return {None: given[id(result)]} if id(result) in given else {}
        items = enumerate(result) if isinstance(result, tuple | list) else ()
        return {place: given[id(item)] for place, item in items if id(item) in given}

    def _attempt(self, node: Node, fakes: list[Any]) -> Any:
        """What `node` gives; nothing where that depends on the data."""
        try:
            with Guard(self._allowance):
                return call_with(node, fakes)()
        except Exception:
            return None


#: How many operators attempts may come down to, and how many more for each node.
_CALLS, _CALLS_BY_NODE = 100_000, 100


def _is_more_than_a_call(target: Any) -> bool:
    """Whether it runs a body, or works in a level of torch.func, which is not open here."""
    return is_higher_order(target) or is_of_level(target)


def _look_alike(result: Any, values: list[Any]) -> bool:
    looks = [_look(tensor) for tensor in tensors_in(values)]
    return any(_look(tensor) in looks for tensor in tensors_in(result))


def _look(tensor: Tensor) -> tuple[object, ...]:
    """Sizes and dtype; sizes as text, since comparing sizes that hang on data is an error."""
    return (*map(str, tensor.shape), tensor.dtype)
