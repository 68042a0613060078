"""Writing watched steps: the operators that a call came down to, as nodes in the place of the call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from partita._torch.nodes import GraphWriter
from partita._torch.stage import Look, Stage, map_leaves
from partita._torch.watching import Label, Step, labels_in
from partita.errors import ModeError
from partita.rewrite.traced_values import write_beside

__all__ = ["StepWriter"]


class StepWriter:
    """Writes steps that stand for `node`; `known` are the nodes that stand for labels, and grow as it writes."""

    def __init__(
        self,
        node: Node,
        writer: GraphWriter,
        stage: Stage,
        known: dict[Label, Node],
        size: Callable[[torch.SymInt], Any],
    ) -> None:
        self.node, self.writer, self.stage, self.known, self.size = node, writer, stage, known, size

    def write(self, step: Step, names: Mapping[Label, str]) -> None:
        """Writes one step, and gives what it makes these names."""
        args, kwargs = self.argument(step.args), self.argument(dict(step.kwargs))
        value = self._value(step)
        if isinstance(step.result, Label):
            self.known[step.result] = self._node(step.target, args, kwargs, value, names.get(step.result))
        else:
            self._unpack(self._node(step.target, args, kwargs, value), step.result, value, names)

    def argument(self, argument: Any) -> Any:
        """An argument of a step, with nodes in place of labels and of sizes that are known only when it runs."""
        return map_leaves(self._leaf, argument)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Label) and leaf not in self.known:
            raise ModeError(
                f"node {self.node.name!r} reads a tensor under autocast that it is not given; pass the function that "
                "it calls all its tensors as arguments"
            )
        if isinstance(leaf, Label):
            return self.known[leaf]
        return self.size(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _unpack(self, container: Node, items: Any, values: Any, names: Mapping[Label, str]) -> None:
        if next(labels_in(items), None) is None:
            return
        for place, (item, value) in enumerate(zip(items, values, strict=True)):
            name = names.get(item) if isinstance(item, Label) else None
            taken = self._node(operator.getitem, (container, place), {}, value, name)
            if isinstance(item, Label):
                self.known[item] = taken
            else:
                self._unpack(taken, item, value, names)

    def _node(self, target: Any, args: Any, kwargs: Any, value: Any, name: str | None = None) -> Node:
        return write_beside(self.writer, self.node, target, args, kwargs, value=value, name=name)

    def _value(self, step: Step) -> Any:
        looks: list[Look] = list(step.looks[::-1])
        return map_leaves(lambda leaf: self.stage.made(looks.pop()) if isinstance(leaf, Label) else leaf, step.result)
