"""A joint graph as a compiler sees it: what is materialized, what it is worth, and what the backward reads.

Under Inductor pointwise operators are fused into kernels: a value lives in memory only if a kernel of its own reads it,
or if it is saved or returned. With `fuses=False` every operator runs by itself, as under `aot_eager`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from math import inf

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.memory._torch.inductor import OperatorKinds, flops_of, is_attention
from partita.memory.rates import Rates
from partita.program.joint import Joint


class JointModel:
    """A joint graph with what a compiler makes of each node; `segment` numbers the nodes of the forward."""

    def __init__(
        self,
        nodes: Sequence[Node],
        joint: Joint,
        segment: dict[Node, int],
        *,
        rates: Rates,
        fuses: bool,
        fixed_bytes: int,
    ) -> None:
        kinds = OperatorKinds()
        calls = [node for node in nodes if node.op == "call_function"]
        self.place = {node: at for at, node in enumerate(nodes)}
        self.forward = list(joint.forward)
        self.is_forward = frozenset(joint.forward)
        self.backward = list(joint.backward)
        self.segment, self.rates, self.fuses, self.fixed_bytes = segment, rates, fuses, fixed_bytes
        self.inputs = frozenset(node for node in nodes if node.op in ("placeholder", "get_attr"))
        self.results = frozenset(value for value in joint.forward_outputs if isinstance(value, Node))
        self.gradients = frozenset(value for value in joint.gradients if isinstance(value, Node))
        self.returned = self.results | self.gradients
        self.views = frozenset(node for node in calls if kinds.is_view(node))
        self.heavy = frozenset(node for node in calls if kinds.is_heavy(node))
        self.fusible = frozenset(node for node in calls if fuses and kinds.is_fusible(node))
        self.random = frozenset(node for node in calls if kinds.is_random(node))
        self.containers = frozenset(node for node in calls if isinstance(value_of(node), tuple | list))
        self.size = {node: self._bytes(node) for node in nodes}
        largest = max((self.size[node] for node in self.forward if node in self.heavy), default=0)
        self.small = frozenset(
            node for node in nodes if isinstance(value_of(node), Tensor) and self.size[node] <= largest // 100
        )
        self.constants = self._constants(nodes)
        self.base = self._bases(nodes)
        self.readers = self._readers(nodes)
        self.last_segment = max(segment.values(), default=0)

    def _bytes(self, node: Node) -> int:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return 0
        if value.layout is not torch.strided:
            return int(hint_of(value.numel())) * value.element_size()
        extent = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            extent += (int(hint_of(size)) - 1) * int(hint_of(stride))
        total = extent * value.element_size() if hint_of(value.numel()) else 0
        return -(-total // 512) * 512 if value.device.type == "cuda" else total

    def _constants(self, nodes: Sequence[Node]) -> frozenset[Node]:
        """What follows from no input at all: a compiler that fuses writes it into every kernel that reads it.

        Saved, a single number would be read from memory by each of them, and Inductor writes large values that read
        several (2.11: the gradient of a loss in float32, twice the bytes of the logits).
        """
        found: set[Node] = set()
        for node in nodes:
            is_inlined = (node in self.fusible or node in self.views) and node not in self.random
            if is_inlined and all(read in found for read in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def _bases(self, nodes: Sequence[Node]) -> dict[Node, Node]:
        """For each node the one whose memory its value is in; an item of several results is its own."""
        base: dict[Node, Node] = {}
        for node in nodes:
            first = node.args[0] if node.args else None
            is_view = node in self.views and isinstance(first, Node) and not self.is_item(node)
            base[node] = base[first] if is_view and isinstance(first, Node) else node
        return base

    def is_item(self, node: Node) -> bool:
        """Whether a node takes a result out of an operator that has several."""
        return node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in self.containers

    def _readers(self, nodes: Sequence[Node]) -> dict[Node, set[Node]]:
        """The nodes that read the memory of each node, through views."""
        readers: dict[Node, set[Node]] = {}
        for node in reversed(nodes):
            found: set[Node] = set()
            for user in node.users:
                if user in self.views and not self.is_item(user):
                    found |= readers[user]
                else:
                    found.add(user)
            readers[node] = found
        return readers

    def is_materialized(self, node: Node, saved: Collection[Node]) -> bool:
        """Whether the value of a node is written to memory of its own."""
        if node in self.views:
            return self.is_item(node)
        if node in self.containers:
            return False
        if node in self.heavy or node not in self.fusible or node in saved or node in self.returned:
            return True
        return any(reader not in self.fusible for reader in self.readers[node])

    def seconds(self, node: Node) -> float:
        """The time to compute a node again; what is fused into its reader is free."""
        if node in self.views or node not in self._written:
            return 0.0
        if node in self.heavy:
            return self._heavy_seconds[node]
        moved = 1.7 * self.size[node] if self.fuses else 2.0 * self.size[node]
        return moved / self.rates.bytes + self.rates.call if node not in self.small else 0.0

    @cached_property
    def _written(self) -> frozenset[Node]:
        written = (node for node in self.forward if node in self.containers or self.is_materialized(node, ()))
        return frozenset((*written, *filter(self.is_shared, self.forward)))

    def is_shared(self, node: Node) -> bool:
        """Whether several operators of the forward read a value that is no wide copy of a narrow one.

        Wide copies, as norms compute with, are made again in each kernel.
        """
        return _width(node) <= self._narrowest and len(self.readers[node] & self.is_forward) > 1

    @cached_property
    def _narrowest(self) -> float:
        return min(map(_width, self.borders), default=inf)

    @cached_property
    def _heavy_seconds(self) -> dict[Node, float]:
        return {
            node: self.rates.seconds(flops_of(node), 0, is_attention=is_attention(node)) or self.rates.call
            for node in self.forward
            if node in self.heavy
        }

    @cached_property
    def read_by_backward(self) -> list[Node]:
        """The values of the forward that the backward reads, or returns."""
        backward = set(self.backward)
        return [node for node in self.forward if node in self.gradients or any(user in backward for user in node.users)]

    def recomputed(self, saved: Collection[Node], needed: Iterable[Node]) -> set[Node]:
        """What the backward must compute again to get `needed`."""
        seen: set[Node] = set()
        todo = [node for node in needed if node not in saved and node in self.is_forward]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += [read for read in node.all_input_nodes if read not in saved and read in self.is_forward]
        return seen

    def reached(self, saved: Collection[Node]) -> set[Node]:
        """Those of the saved values that the backward reads, or recomputes something from."""
        found: set[Node] = set()
        seen: set[Node] = set()
        todo = list(self.read_by_backward)
        while todo:
            node = todo.pop()
            if node in saved:
                found.add(node)
            elif node not in seen:
                seen.add(node)
                todo += [read for read in node.all_input_nodes if read in self.is_forward]
        return found

    @cached_property
    def borders(self) -> frozenset[Node]:
        """The values that later segments read."""
        found = {
            self.base[node]
            for node in self.forward
            for user in node.users
            if user in self.is_forward and self.segment[user] > self.segment[node]
        }
        return frozenset(node for node in found if node in self.is_forward)


def _width(node: Node) -> int:
    value = value_of(node)
    return value.element_size() if isinstance(value, Tensor) else 0
