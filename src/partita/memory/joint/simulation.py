"""The bytes that a joint graph allocates, node by node, in the forward and the backward that a compiler makes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from torch.fx import Node

from partita.analysis.nodes import value_of
from partita.memory._torch.workspaces import workspace_bytes
from partita.memory.joint.model import JointModel
from partita.memory.joint.order import Order, backward_order, last_uses


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
    #: Products of the backward that run after a later one, which frees more.
    delayed: dict[Node, Node] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)


def simulate(model: JointModel, saved: Collection[Node]) -> Simulated:
    """Runs forward and backward in numbers if these values are saved for backward."""
    base, reached = model.base, model.reached(saved)
    held = {base[node] for node in reached if base[node] not in model.inputs}
    results = {base[node] for node in model.results if base[node] not in model.inputs}
    gradients = {base[node] for node in model.gradients if base[node] not in model.inputs}
    forward = _Run(model, Order(model.forward), frozenset(), held | results, reached)
    kept = gradients | (results - held)
    order = backward_order(model, reached, initially=held | results, kept=kept)
    backward = _Run(model, order, held | results, kept, reached)
    higher = backward if backward.peak >= forward.peak else forward
    return Simulated(
        forward.peak,
        backward.peak,
        _forward_by_segment(model, forward.series),
        _backward_by_segment(model, order.nodes, backward.series),
        higher.at_peak,
        higher.peak_node,
        (
            *((model.forward[at], size) for at, size in forward.series),
            *((order.nodes[at], size) for at, size in backward.series),
        ),
        tuple(_phases(model, forward.series, order.nodes, backward.series)),
        order.delayed,
    )


@final
@dataclass(frozen=True, slots=True)
class SimulatedPart:
    """The bytes of a graph that is a part of a step, beside its inputs, gradients of its results among them."""

    forward_peak: int
    #: The highest point of its backward, with what it has saved.
    backward_peak: int
    #: What it holds between forward and backward, without inputs and results.
    held: int
    #: The inputs and the results that are saved for its backward: the nodes whose memory they are in.
    saved_inputs: frozenset[Node]
    saved_results: frozenset[Node]
    #: The operator at the highest point of the backward.
    backward_at: Node | None


def simulate_part(model: JointModel, saved: Collection[Node]) -> SimulatedPart:
    """The same for a part of a step: its results stay only if they are saved, or as long as other parts hold them."""
    base, reached = model.base, model.reached(saved)
    held = {base[node] for node in reached if base[node] not in model.inputs}
    results = {base[node] for node in model.results if base[node] not in model.inputs}
    gradients = {base[node] for node in model.gradients if base[node] not in model.inputs}
    forward = _Run(model, Order(model.forward), frozenset(), held | results, reached)
    order = backward_order(model, reached, initially=held, kept=gradients)
    backward = _Run(model, order, held, gradients, reached)
    read = {one for node in order.nodes for one in node.all_input_nodes}
    return SimulatedPart(
        forward.peak,
        backward.peak,
        sum(model.size[node] for node in held - results),
        frozenset(base.get(node, node) for node in read | reached) & model.inputs,
        frozenset(held & results),
        backward.peak_node,
    )


def _phases(
    model: JointModel, forward: Sequence[tuple[int, int]], order: Sequence[Node], backward: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int]]:
    for at, _ in forward:
        yield "forward", model.segment[model.forward[at]]
    where = _segments_in_backward(model, order)
    for at, _ in backward:
        yield "recompute" if order[at] in model.is_forward else "backward", where[at]


def _forward_by_segment(model: JointModel, series: Sequence[tuple[int, int]]) -> dict[int, int]:
    highest: dict[int, int] = {}
    for place, size in series:
        at = model.segment[model.forward[place]]
        highest[at] = max(highest.get(at, 0), size)
    return highest


def _backward_by_segment(model: JointModel, order: Sequence[Node], series: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The highest point of the backward of each segment: of all nodes from its first reader on."""
    where = _segments_in_backward(model, order)
    highest: dict[int, int] = {}
    for place, size in series:
        highest[where[place]] = max(highest.get(where[place], 0), size)
    return highest


def _segments_in_backward(model: JointModel, order: Sequence[Node]) -> list[int]:
    """For each node of the backward the segment whose backward it belongs to."""
    where, current = [], model.last_segment
    for node in order:
        for read in (node, *node.all_input_nodes):
            base = model.base.get(read, read)
            if base in model.segment:
                current = min(current, model.segment[base] + (base in model.borders))
        current = min(current, model.last_segment)
        where.append(current)
    return where


class _Run:
    """One half, node by node: which values are allocated, and the highest point."""

    def __init__(
        self,
        model: JointModel,
        order: Order,
        initially: Collection[Node],
        kept: Collection[Node],
        saved: Collection[Node],
    ) -> None:
        self.model, self.kept = model, kept
        self.written = {node: model.is_materialized(node, saved) for node in order.nodes}
        self.live = {node: model.size[node] for node in initially}
        self.allocated = model.fixed_bytes + sum(self.live.values())
        self.peak, self.at_peak, self.peak_node = self.allocated, dict(self.live), next(iter(order.nodes), None)
        self.series: list[tuple[int, int]] = []
        self.lifetimes = last_uses(model, order, self.written, initially)
        self.freed: dict[int, list[Node]] = {}
        for base, place in self.lifetimes.freed.items():
            self.freed.setdefault(place, []).append(base)
        for place, node in enumerate(order.nodes):
            self._step(place, node)

    def _step(self, place: int, node: Node) -> None:
        model = self.model
        if node in model.containers:
            for user in node.users:
                if user in self.written:
                    self._allocate(user)
            self._note(place, node, _workspace(node))
        elif self.written[node] and node not in self.live:
            if node in model.fusible:
                self._overwrite_input(place, node)
            self._allocate(node)
            self._note(place, node, _workspace(node))
        for dead in self.freed.get(place, ()):
            self._free(dead)
        if not self.lifetimes.uses.get(node):
            self._free(node)

    def _free(self, node: Node) -> None:
        if node in self.live and node not in self.kept:
            self.allocated -= self.live.pop(node)

    def _allocate(self, node: Node) -> None:
        if node not in self.live:
            self.live[node] = self.model.size[node]
            self.allocated += self.live[node]

    def _overwrite_input(self, place: int, node: Node) -> None:
        """Frees an input of the same size that nothing else reads, since the kernel writes its result there."""
        last, uses = self.lifetimes.last, self.lifetimes.uses
        for read in sorted(self.lifetimes.sources[node], key=self.model.place.__getitem__):
            is_last = last.get(read) == place and uses.get(read) == 1
            if is_last and self.live.get(read) == self.model.size[node] and read not in self.kept:
                self._free(read)
                return

    def _note(self, place: int, node: Node, extra: int) -> None:
        now = self.allocated + extra
        self.series.append((place, now))
        if now > self.peak:
            self.peak, self.at_peak, self.peak_node = now, dict(self.live), node


def _workspace(node: Node) -> int:
    """What the kernel of an operator allocates inside on a GPU; joint graphs pass the arguments that count by place."""
    values = [value_of(one) if isinstance(one, Node) else one for one in node.args]
    return workspace_bytes(node.target, values, value_of(node))
