"""Leaves: the parameters and inputs of a program as fake tensors, whose casts autocast keeps as in a real run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.fx import Node

from partita._torch.stage import Stage
from partita.graphs.program import Program
from partita.rewrite.owned_inputs import owned_inputs
from partita.rewrite.returned_arguments import ReturnedArguments
from partita.rewrite.traced_values import can_carry_gradients, value_read

__all__ = ["Leaves"]


class Leaves:
    """One fake tensor for each tensor that a program is given or owns, the same wherever it is read.

    Autocast keeps the cast of a tensor that requires gradients and was computed from nothing. Tensors that nobody
    writes count as such whatever they require: a cast of theirs that is kept has the same value.
    """

    def __init__(self, program: Program, stage: Stage) -> None:
        self._program, self._stage = program, stage
        self._written = {program.index.nodes[number] for number in program.effects.written_inputs}
        self._owned = owned_inputs(program)
        self._returned = ReturnedArguments(program, stage)
        self._found: dict[Any, tuple[int, Tensor]] = {}
        self._origins: dict[Node, Node | None] = {}

    def of(self, node: Node, dtypes: Hashable) -> tuple[int, Tensor] | None:
        """The leaf that `node` gives where autocast casts to `dtypes`, and its number; None if it gives no leaf.

        A tensor that requires no gradients is another leaf for other dtypes: it is cast to each of them, while one that
        does has but one cast in a nest of blocks.
        """
        origin = self._origin(node)
        return None if origin is None else self._leaf(origin, dtypes)

    def _origin(self, node: Node) -> Node | None:
        """The input or attribute that `node` gives: writing a weight, or casting it to what it is, gives the weight."""
        passed: list[Node] = []
        source: Node | None = node
        while source is not None and source.op not in ("placeholder", "get_attr"):
            if source in self._origins:
                source = self._origins[source]
                break
            passed.append(source)
            source = self._returned.of(source).get(None)
        self._origins.update(dict.fromkeys(passed, source))
        return source

    def _leaf(self, node: Node, dtypes: Hashable) -> tuple[int, Tensor] | None:
        value = value_read(self._program, node)
        if not isinstance(value, Tensor) or not can_carry_gradients(value):
            return None
        owned = value if node.op == "get_attr" else self._owned.get(node)
        held = value if owned is None else owned
        # What was written where gradients are recorded is no leaf, and the trace may note its state at the end.
        is_known = held.requires_grad and held.is_leaf
        key = (node if owned is None else id(owned), None if is_known else dtypes)
        if key not in self._found:
            fake = self._stage.copy(value, requires_grad=is_known or node not in self._written)
            self._found[key] = (len(self._found), fake)
        return self._found[key]
