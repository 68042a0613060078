"""Gradient carriers: the nodes whose results gradients may flow back through."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from partita._torch.stage import tensors_in
from partita.graphs.aliasing import storages_of, written_classes
from partita.graphs.attributes import find
from partita.graphs.behaviours import Behaviours
from partita.graphs.mode import Mode
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.rewrite.owned_inputs import owned_inputs
from partita.rewrite.returned_arguments import ReturnedArguments
from partita.rewrite.traced_values import can_carry_gradients, has_value

__all__ = ["detaches", "gradient_carriers", "records_gradients"]


def records_gradients(mode: Mode) -> bool:
    """Whether operators in this mode record gradients; a caller of whom nothing is known does."""
    return mode.grad is not False and not mode.inference


def detaches(node: Node) -> bool:
    """Whether `node` only cuts gradients off."""
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach, torch.detach, "detach")


def gradient_carriers(program: Program, returned: ReturnedArguments) -> frozenset[Node]:
    """The nodes that may carry gradients: all whose values have them but for what is computed without.

    Buffers carry none, unless something that does is written into them where gradients are recorded.
    """
    return _Carriers(program, returned).found()


class _Carriers:
    def __init__(self, program: Program, returned: ReturnedArguments) -> None:
        self.program, self.returned = program, returned
        index, root = program.index, program.graph_module
        behaviours = Behaviours(root, program.pure)
        acting = behaviours.acting(index.graph)
        storages = storages_of(index, behaviours, acting)
        self.classes = storages.roots()
        self.written = written_classes(index, storages, acting)
        self.unknown = {node for node, told in acting.items() if told.unknown}
        self.owned = owned_inputs(program)
        self.tainted: set[int] = set()

    def found(self) -> frozenset[Node]:
        """Walks until no more storage turns out to hold gradients: twice in all but contrived graphs."""
        while True:
            before = len(self.tainted)
            carriers = self._walked()
            if len(self.tainted) == before:
                return frozenset(carriers)

    def _walked(self) -> set[Node]:
        carriers: set[Node] = set()
        modes, caller = self.program.modes, self.program.caller
        for number, node in enumerate(self.program.index.nodes):
            records = records_gradients(modes.at(number).within(caller))
            reads_some = any(read in carriers for read in node.all_input_nodes)
            if records and reads_some:
                self.tainted |= self.written.get(number, set())
            if self._may_hold(node) and (
                self.classes[number] in self.tainted or self._carries(node, records=records, carriers=carriers)
            ):
                carriers.add(node)
        return carriers

    def _carries(self, node: Node, *, records: bool, carriers: Collection[Node]) -> bool:
        if node.op == "placeholder":
            return records_gradients(self.program.caller) and _may_require_gradients(self.owned.get(node))
        if node.op == "get_attr":
            return _may_require_gradients(find(self.program.graph_module, str(node.target)))
        if not records:
            return any(source in carriers for source in self.returned.of(node).values())
        makes_some = node.op == "call_module" or node in self.unknown or _asks_for_gradients(node)
        return makes_some or (not detaches(node) and any(read in carriers for read in node.all_input_nodes))

    def _may_hold(self, node: Node) -> bool:
        """Whether the result of `node` has numbers that can have gradients, as far as anyone knows."""
        value: Any = value_of(node)
        if node.op == "get_attr":
            value = find(self.program.graph_module, str(node.target))
        elif node.op == "output":
            return False
        elif not has_value(node):
            return True
        return any(map(can_carry_gradients, tensors_in(value)))


def _may_require_gradients(owned: Any) -> bool:
    """Whether a tensor of the module may require gradients, now or when it is no longer frozen; inputs may."""
    if isinstance(owned, Tensor) and not isinstance(owned, nn.Parameter):
        return owned.requires_grad
    return not isinstance(owned, nn.Module)


def _asks_for_gradients(node: Node) -> bool:
    return node.kwargs.get("requires_grad") is True or "requires_grad_" in str(node.target)
