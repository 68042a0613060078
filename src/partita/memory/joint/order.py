"""The order in which a compiler runs the backward of a joint graph: recomputation, fused kernels, early frees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import final

from torch.fx import Node

from partita.memory.joint.model import JointModel


@final
@dataclass(frozen=True, slots=True)
class Order:
    """Nodes as they run; the members of a kernel with several outputs follow each other, and are mapped to its last."""

    nodes: list[Node]
    last_of_kernel: dict[Node, Node] = field(default_factory=dict)
    #: Products that run after a later one, which frees more.
    delayed: dict[Node, Node] = field(default_factory=dict)


def backward_order(
    model: JointModel, saved: Collection[Node], *, initially: Collection[Node], kept: Collection[Node]
) -> Order:
    """The nodes of the backward with those that it recomputes.

    `initially` is allocated when it begins, `kept` is not freed.
    """
    order = list(_with_recomputed(model, {*saved, *(model.base[node] for node in saved)}))
    if not model.fuses:
        return Order(order)
    kernels = _Kernels(model, order, saved)
    order = _scheduled(order, kernels)
    delayed = _delayed_products(model, order, saved, initially=initially, kept=kept)
    behind = {late: early for early, late in delayed.items()}
    order = [one for node in order if node not in delayed for one in (node, behind.get(node)) if one is not None]
    last = {node: members[-1] for members in kernels.members.values() for node in members if len(members) > 1}
    return Order(order, last, delayed)


def _with_recomputed(model: JointModel, available: set[Node]) -> Iterator[Node]:
    """Every node of the backward, and just before it what is recomputed for it."""
    done = set(available)
    for node in model.backward:
        pulled: set[Node] = set()
        todo = [read for read in node.all_input_nodes if read in model.is_forward and read not in done]
        while todo:
            read = todo.pop()
            if read not in pulled and read not in done:
                pulled.add(read)
                todo += [one for one in read.all_input_nodes if one in model.is_forward]
        yield from sorted(pulled, key=model.place.__getitem__)
        done |= pulled
        yield node


#: Operators that are further apart are not fused; Inductor (2.13) fuses at most 64.
_FUSION_DISTANCE = 60


class _Kernels:
    """Which large values one kernel writes: pointwise ones of one size that read the same large value.

    All outputs of a kernel are allocated before any input is freed.
    """

    def __init__(self, model: JointModel, order: Sequence[Node], saved: Collection[Node]) -> None:
        self._model, self._saved = model, saved
        self._at = {node: place for place, node in enumerate(order)}
        #: For each value that is written, the first one of its kernel.
        self.first: dict[Node, Node] = {}
        self.members: dict[Node, list[Node]] = {}
        reading: dict[Node, dict[Node, None]] = {}
        for node in order:
            if node not in model.fusible or node in model.small or not model.is_materialized(node, saved):
                continue
            sources = self._sources(node)
            near = dict.fromkeys(first for source in sources for first in reading.get(source, ()))
            first = next((one for one in near if self._can_join(one, node)), node)
            self.first[node] = first
            self.members.setdefault(first, []).append(node)
            for source in sources:
                reading.setdefault(source, {})[first] = None

    def split(self, first: Node) -> None:
        """Gives each member a kernel of its own."""
        for node in self.members.pop(first):
            self.first[node] = node
            self.members[node] = [node]

    def key(self, order: Sequence[Node]) -> dict[Node, int]:
        """The place at which a node may run at the earliest: with the kernel that it is computed in."""
        key = dict(self._at)
        for node in reversed(order):
            if node in self.first:
                key[node] = self._at[self.first[node]]
            elif node in self._model.views or not self._model.is_materialized(node, self._saved):
                key[node] = min([key[node], *(key[user] for user in node.users if user in key)])
        return key

    def _can_join(self, first: Node, node: Node) -> bool:
        is_near = self._at[node] - self._at[first] < _FUSION_DISTANCE
        if not is_near or self._model.size[first] != self._model.size[node]:
            return False
        return not any(self._depends(node, member) for member in self.members[first])

    def _depends(self, late: Node, early: Node) -> bool:
        todo, seen = [late], set[Node]()
        while todo:
            node = todo.pop()
            if node is early:
                return True
            if node not in seen and self._at.get(node, -1) > self._at[early]:
                seen.add(node)
                todo += node.all_input_nodes
        return False

    def _sources(self, node: Node) -> list[Node]:
        """The large values in memory that the kernel of a node reads."""
        model, found, seen = self._model, dict[Node, None](), set[Node]()
        todo = list(node.all_input_nodes)
        while todo:
            base = model.base[todo.pop()]
            if base in seen:
                continue
            seen.add(base)
            is_written = base in model.inputs or base in self._saved or model.is_materialized(base, self._saved)
            if is_written or base not in self._at:
                found[base] = None
            else:
                todo += base.all_input_nodes
        return [base for base in found if base not in model.small]


def _scheduled(order: list[Node], kernels: _Kernels) -> list[Node]:
    """The order in which each kernel runs when all that it reads is there, and as early as its first member could.

    Kernels that need each other are split.
    """
    while True:
        done = _run_kernels(order, kernels)
        if len(done) == len(order):
            return done
        left = set(order) - set(done)
        for node in order:
            first = kernels.first.get(node)
            if node in left and node is first and len(kernels.members[first]) > 1:
                kernels.split(first)


def _run_kernels(order: list[Node], kernels: _Kernels) -> list[Node]:
    """As much of the order as can run; less than all of it if kernels need each other."""
    unit = {node: kernels.first.get(node, node) for node in order}
    members = {one: kernels.members.get(one, [one]) for one in unit.values()}
    needs = {
        one: {unit[read] for node in nodes for read in node.all_input_nodes if read in unit} - {one}
        for one, nodes in members.items()
    }
    users: dict[Node, list[Node]] = {}
    for one, reads in needs.items():
        for read in reads:
            users.setdefault(read, []).append(one)
    open_needs = {one: len(reads) for one, reads in needs.items()}
    key, place = kernels.key(order), {node: at for at, node in enumerate(order)}
    ready = [(key[one], place[one]) for one, count in open_needs.items() if not count]
    heapify(ready)
    done: list[Node] = []
    while ready:
        one = order[heappop(ready)[1]]
        done += members[one]
        for user in users.get(one, ()):
            open_needs[user] -= 1
            if not open_needs[user]:
                heappush(ready, (key[user], place[user]))
    return done


def _delayed_products(
    model: JointModel,
    order: list[Node],
    saved: Collection[Node],
    *,
    initially: Collection[Node],
    kept: Collection[Node],
) -> dict[Node, Node]:
    """Of two products in a row that do not need each other, where the second frees more: the first, and the second."""
    is_written = {node: model.is_materialized(node, saved) for node in order}
    lifetimes = last_uses(model, Order(order), is_written, initially)
    places = [at for at, node in enumerate(order) if is_written[node] or node in model.containers]
    delayed: dict[Node, Node] = {}
    moved: set[Node] = set()
    for start, end in pairwise(places):
        one, two = order[start], order[end]
        if not {one, two} <= model.heavy or {one, two} & model.containers or one in moved:
            continue
        reads_one, reads_two = lifetimes.sources[one], lifetimes.sources[two]
        lasting = {base for base in reads_one | reads_two if base in kept or lifetimes.last[base] > end}
        by_one = sum(model.size[base] for base in reads_one - reads_two - lasting)
        by_two = sum(model.size[base] for base in reads_two - reads_one - lasting)
        first, second = model.size[one], model.size[two]
        is_lower = max(second, second - by_two + first) < max(first, first - by_one + second)
        if is_lower and not any(one in node.all_input_nodes for node in order[start + 1 : end + 1]):
            delayed[one] = two
            moved |= {one, two}
    return delayed


@final
@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Which values in memory each node reads, where each is read last and can be freed, and how many nodes read it."""

    sources: dict[Node, set[Node]]
    last: dict[Node, int]
    #: A kernel allocates all of its outputs before it frees an input.
    freed: dict[Node, int]
    uses: dict[Node, int]


def last_uses(model: JointModel, order: Order, written: dict[Node, bool], initially: Iterable[Node]) -> Lifetimes:
    """The lifetimes of the values in memory for one order."""
    allocated = set(initially)
    sources: dict[Node, set[Node]] = {}
    last: dict[Node, int] = dict.fromkeys(allocated, 0)
    uses: dict[Node, int] = {}
    for place, node in enumerate(order.nodes):
        found: set[Node] = set()
        for read in node.all_input_nodes:
            base = model.base.get(read, read)
            if base in allocated or written.get(base):
                found.add(base)
            else:
                found |= sources.get(base, set())
        sources[node] = found
        if written[node] or node in model.containers:
            for base in found:
                last[base] = place
                uses[base] = uses.get(base, 0) + 1
    places = {node: place for place, node in enumerate(order.nodes)}
    end = [places[order.last_of_kernel.get(node, node)] for node in order.nodes]
    return Lifetimes(sources, last, {base: end[place] for base, place in last.items()} if end else {}, uses)
