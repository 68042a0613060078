"""A joint graph as a compiler runs it: what is materialized, in which order, and the bytes allocated meanwhile.

Under Inductor pointwise operators are fused into kernels: a value lives in memory only if a kernel of its own reads it,
or if it is saved or returned. With `fuses=False` every operator runs by itself, as under `aot_eager`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.memory._torch.inductor import OperatorKinds, flops_of, is_attention
from partita.memory.rates import Rates
from partita.program.joint import Joint


@final
@dataclass(frozen=True, slots=True)
class Simulated:
    """The bytes of a step with given saved values, beside what is allocated throughout."""

    forward_peak: int
    backward_peak: int
    #: The highest point of the forward and of the backward of each segment.
    forward_by_segment: dict[int, int]
    backward_by_segment: dict[int, int]
    #: What is allocated at the peak, with its bytes, and the node that runs then.
    occupants: dict[Node, int]
    at: Node | None
    #: Bytes after every node that allocates: forward, then backward.
    series: tuple[tuple[Node, int], ...]
    #: For each of these whether it is "forward", "recompute" or "backward", and of which segment.
    phases: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)


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

    def simulate(self, saved: Collection[Node]) -> Simulated:
        """Runs forward and backward in numbers, in the order of torch's partitioner."""
        reached = self.reached(saved)
        held = {self.base[node] for node in reached if self.base[node] not in self.inputs}
        results = {self.base[node] for node in self.results if self.base[node] not in self.inputs}
        forward = _Run(self, self.forward, frozenset(), held | results, reached)
        order = self._delayed(list(self._backward_order(reached, held)), reached)
        gradients = {self.base[node] for node in self.gradients if self.base[node] not in self.inputs}
        backward = _Run(self, order, held | results, gradients | (results - held), reached)
        higher = backward if backward.peak >= forward.peak else forward
        return Simulated(
            forward.peak,
            backward.peak,
            self._forward_by_segment(forward.series),
            self._backward_by_segment(order, backward.series),
            higher.at_peak,
            higher.peak_node,
            (
                *((self.forward[at], size) for at, size in forward.series),
                *((order[at], s) for at, s in backward.series),
            ),
            tuple(self._phases(forward.series, order, backward.series)),
        )

    def _phases(
        self, forward: Sequence[tuple[int, int]], order: Sequence[Node], backward: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, int]]:
        for at, _ in forward:
            yield "forward", self.segment[self.forward[at]]
        where = self._segments_in_backward(order)
        for at, _ in backward:
            yield "recompute" if order[at] in self.is_forward else "backward", where[at]

    def _backward_order(self, saved: Collection[Node], held: Collection[Node]) -> Iterator[Node]:
        """Every node of the backward, and just before it what is recomputed for it."""
        done = {*held, *saved}
        for node in self.backward:
            pulled: set[Node] = set()
            todo = [read for read in node.all_input_nodes if read in self.is_forward and read not in done]
            while todo:
                read = todo.pop()
                if read not in pulled and read not in done:
                    pulled.add(read)
                    todo += [one for one in read.all_input_nodes if one in self.is_forward]
            yield from sorted(pulled, key=self.place.__getitem__)
            done |= pulled
            yield node

    def _delayed(self, order: list[Node], saved: Collection[Node]) -> list[Node]:
        """The order in which recomputed values are written by the kernel of a later one that reads the same.

        Inductor fuses pointwise operators that read the same large values, so all of them are written where the last
        one is; what reads a delayed value moves behind it.
        """
        if not self.fuses:
            return order
        at = {node: place for place, node in enumerate(order)}
        early: dict[Node, list[Node]] = {}
        joins: dict[Node, Node] = {}
        for place, node in enumerate(order):
            if node not in self.fusible or node in self.small or not self.is_materialized(node, saved):
                continue
            for source in self._sources(node, at, saved):
                if node in self.is_forward:
                    early.setdefault(source, []).append(node)
                    continue
                for one in early.get(source, ()):
                    if one not in joins and place - at[one] < _FUSION_DISTANCE and self.size[one] == self.size[node]:
                        joins[one] = node
        return self._moved(order, at, joins)

    def _sources(self, node: Node, at: dict[Node, int], saved: Collection[Node]) -> list[Node]:
        """The large values in memory that the kernel of a node reads."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            base = self.base[todo.pop()]
            if base in seen:
                continue
            seen.add(base)
            if base in self.inputs or base in saved or self.is_materialized(base, saved) or base not in at:
                found[base] = None
            else:
                todo += base.all_input_nodes
        return [base for base in found if base not in self.small]

    def _moved(self, order: list[Node], at: dict[Node, int], joins: dict[Node, Node]) -> list[Node]:
        behind: dict[Node, list[Node]] = {}
        taken: set[Node] = set()
        for early, late in joins.items():
            if early in taken or late in taken or self._depends(late, early, at):
                continue
            chain, todo = {early}, [early]
            while todo:
                users = [user for user in todo.pop().users if at.get(user, len(order)) < at[late] and user not in chain]
                chain.update(users)
                todo += users
            if not chain & taken:
                taken |= chain
                behind.setdefault(late, []).extend(sorted(chain, key=at.__getitem__))
        moved: list[Node] = []
        for node in order:
            if node not in taken:
                own = behind.get(node, [])
                moved += [*(one for one in own if one in joins), node, *(one for one in own if one not in joins)]
        return moved

    def _depends(self, late: Node, early: Node, at: dict[Node, int]) -> bool:
        todo, seen = [late], set[Node]()
        while todo:
            node = todo.pop()
            if node is early:
                return True
            if node not in seen and at.get(node, -1) > at[early]:
                seen.add(node)
                todo += node.all_input_nodes
        return False

    def _forward_by_segment(self, series: Sequence[tuple[int, int]]) -> dict[int, int]:
        highest: dict[int, int] = {}
        for place, size in series:
            at = self.segment[self.forward[place]]
            highest[at] = max(highest.get(at, 0), size)
        return highest

    def _backward_by_segment(self, order: Sequence[Node], series: Sequence[tuple[int, int]]) -> dict[int, int]:
        """The highest point of the backward of each segment: of all nodes from its first reader on."""
        where = self._segments_in_backward(order)
        highest: dict[int, int] = {}
        for place, size in series:
            highest[where[place]] = max(highest.get(where[place], 0), size)
        return highest

    def _segments_in_backward(self, order: Sequence[Node]) -> list[int]:
        """For each node of the backward the segment whose backward it belongs to."""
        where, current = [], self.last_segment
        for node in order:
            for read in (node, *node.all_input_nodes):
                base = self.base.get(read, read)
                if base in self.segment:
                    current = min(current, self.segment[base] + (base in self.borders))
            current = min(current, self.last_segment)
            where.append(current)
        return where

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


#: Operators that are further apart are not fused; a guess that covers a block.
_FUSION_DISTANCE = 60


class _Run:
    """One half, node by node: which values are allocated, and the highest point."""

    def __init__(
        self,
        model: JointModel,
        order: Sequence[Node],
        initially: Collection[Node],
        kept: Collection[Node],
        saved: Collection[Node],
    ) -> None:
        self.model, self.order, self.kept = model, order, kept
        self.written = {node: model.is_materialized(node, saved) for node in order}
        self.live = {node: model.size[node] for node in initially}
        self.allocated = model.fixed_bytes + sum(self.live.values())
        self.peak, self.at_peak, self.peak_node = self.allocated, dict(self.live), None if not order else order[0]
        self.series: list[tuple[int, int]] = []
        self.dies, self.uses = self._last_uses(initially)
        for place, node in enumerate(order):
            self._step(place, node)

    def _last_uses(self, initially: Collection[Node]) -> tuple[dict[int, list[Node]], dict[Node, int]]:
        """The values that die after each place, and how many kernels read each."""
        model, sources = self.model, dict[Node, set[Node]]()
        last: dict[Node, int] = dict.fromkeys(initially, 0)
        uses: dict[Node, int] = {}
        for place, node in enumerate(self.order):
            found: set[Node] = set()
            for read in node.all_input_nodes:
                base = model.base.get(read, read)
                if base in initially or self.written.get(base):
                    found.add(base)
                else:
                    found |= sources.get(base, set())
            sources[node] = found
            if self.written[node] or node in model.containers:
                for base in found:
                    last[base] = place
                    uses[base] = uses.get(base, 0) + 1
        dies: dict[int, list[Node]] = {}
        for base, place in last.items():
            dies.setdefault(place, []).append(base)
        return dies, uses

    def _step(self, place: int, node: Node) -> None:
        model = self.model
        workspace = reused = 0
        if node in model.containers:
            for user in node.users:
                if user in self.written:
                    self._allocate(user)
            workspace = self._workspace(node)
            self._note(place, node, workspace)
        elif self.written[node] and node not in self.live:
            if node in model.fusible:
                reused = self._reused(place, node)
            self._allocate(node)
            self._note(place, node, -reused)
        for dead in self.dies.get(place, ()):
            if dead in self.live and dead not in self.kept:
                self.allocated -= self.live.pop(dead)
        if node in self.live and not self.uses.get(node) and node not in self.kept:
            self.allocated -= self.live.pop(node)

    def _allocate(self, node: Node) -> None:
        if node not in self.live:
            self.live[node] = self.model.size[node]
            self.allocated += self.live[node]

    def _reused(self, place: int, node: Node) -> int:
        """The bytes of an input that dies here and that the kernel overwrites in place."""
        for dead in self.dies.get(place, ()):
            fits = self.live.get(dead) == self.model.size[node] and self.uses.get(dead) == 1
            if fits and dead not in self.kept:
                return self.model.size[node]
        return 0

    def _workspace(self, node: Node) -> int:
        """What flash attention's backward allocates inside on a GPU: an accumulator in float32."""
        value: Any = value_of(node)
        tensors = [one for one in value if isinstance(one, Tensor)]
        if "attention" not in str(node.target) or "backward" not in str(node.target) or not tensors:
            return 0
        largest = max(tensors, key=lambda one: int(hint_of(one.numel())))
        return 4 * int(hint_of(largest.numel())) if largest.device.type == "cuda" else 0

    def _note(self, place: int, node: Node, extra: int) -> None:
        now = self.allocated + extra
        self.series.append((place, now))
        if now > self.peak:
            self.peak, self.at_peak, self.peak_node = now, dict(self.live), node
