"""A drop-in replacement for `torch.fx.passes.infra.partitioner`, with its names, arguments and results."""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from partita._torch.gc_pause import gc_paused
from partita._torch.operator_schemas import may_return_container, qualified_names
from partita.analysis.nodes import value_of
from partita.compat._fused_groups import FusionError, checked_module
from partita.compat.fuser_utils import fuse_by_partitions
from partita.errors import CycleError, OptionError
from partita.policies.by_capability import ByCapability
from partita.policies.capability import Units, units_of
from partita.policies.legalize import call_user_function
from partita.program.program import Program, program_being_edited
from partita.solvers.few_parts import grown_parts
from partita.solvers.relation import REFUSED, Relation, earliest_levels, latest_levels

__all__ = ["CapabilityBasedPartitioner", "Partition"]


log = logging.getLogger(__name__)

_NON_COMPUTE_BY_DEFAULT = ("torch.ops.aten.view", "_operator.getitem")


class Partition:
    """Nodes that will be fused; the value of each is its place in the graph, counted from the end, where known."""

    def __init__(
        self, id: int | None = None, nodes: Iterable[Node] | None = None, node_orders: Iterable[int] | None = None
    ) -> None:
        self.id = id
        held = [] if nodes is None else list(nodes)
        orders: list[int | None] = [None] * len(held) if nodes is None or node_orders is None else list(node_orders)
        if len(held) != len(orders):
            raise FusionError(
                f"nodes and node_orders must have the same length: there are {len(held)} and {len(orders)}"
            )
        self.nodes: dict[Node, int | None] = dict(zip(held, orders, strict=True))

    def __repr__(self) -> str:
        return str(self.nodes)

    def add_node(self, node: Node, node_order: int | None = None) -> None:
        """Adds `node`."""
        self.nodes[node] = node_order

    def remove_node(self, node: Node) -> None:
        """Removes `node`."""
        del self.nodes[node]

    def size(self) -> int:
        """The number of nodes."""
        return len(self.nodes)


class CapabilityBasedPartitioner:
    """Finds the fewest partitions that hold all supported nodes, and fuses each into a submodule.

    `non_compute_ops` and `allowed_single_node_partition_ops` name functions as torch does; the name of an operator
    without an overload stands for all of its overloads, and for the method of tensors that calls it. Unless
    `allows_single_node_partition` is set, a partition with a single call that computes is excluded.
    """

    # Here and not in `__init__`, which a subclass may skip when it sets all that torch's sets.
    _submodules: dict[str, nn.Module] | None = None
    _dependency_viewer: Any = None

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.graph_module = checked_module(graph_module, "what is partitioned is")
        self.operator_support = _checked_support(operator_support)
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = checked_names(non_compute_ops, "non_compute_ops")
        self.allowed_single_node_partition_ops = checked_names(
            allowed_single_node_partition_ops, "allowed_single_node_partition_ops"
        )
        self.skip_horizontal_fusion = skip_horizontal_fusion

    @property
    def dependency_viewer(self) -> Any:
        """The dependencies in the current graph, or what a subclass has set, as torch lets it."""
        return _DependencyViewer(self.graph_module) if self._dependency_viewer is None else self._dependency_viewer

    @dependency_viewer.setter
    def dependency_viewer(self, viewer: Any) -> None:
        self._dependency_viewer = viewer

    @gc_paused()
    def propose_partitions(self) -> list[Partition]:
        """The partitions, those at the end of the graph first; the operator support is queried once per node.

        No partition holds nodes that must run in different modes, or nodes between which something else must run.
        """
        program = program_being_edited(self.graph_module)
        supported = self._supported(program)
        place = {node: at for at, node in enumerate(reversed(program.index.nodes))}
        proposed = []
        for part in proposal(program, supported, connected=self.skip_horizontal_fusion):
            proposed.append(Partition(part.number, part.nodes, [place[node] for node in part.nodes]))
            for node in part.moved:
                proposed[-1].add_node(node)
        if not self.allows_single_node_partition:
            proposed = self._without_single_nodes(proposed)
        for partition in proposed if log.isEnabledFor(logging.DEBUG) else ():
            log.debug("partition #%s: %s", partition.id, [node.name for node in partition.nodes])
        return proposed

    def fuse_partitions(self, partitions: list[Partition], prefix: str = "fused_") -> GraphModule:
        """The graph module with each partition fused, in place."""
        return fuse_by_partitions(self.graph_module, [partition.nodes for partition in partitions], prefix=prefix)

    def remove_bookend_non_compute_ops(self, partitions: list[Partition]) -> None:
        """Removes from each partition the `non_compute_ops` at its borders that effects do not keep inside."""
        non_compute, kept_in_order = NamedOperators(self.non_compute_ops), defaultdict[Node, list[Node]](list)
        program = program_being_edited(self.graph_module)
        nodes = program.index.nodes
        for before, after in program.effects.edges():
            kept_in_order[nodes[before]].append(nodes[after])
        for partition in partitions:
            for node in bookends(partition.nodes, non_compute, kept_in_order):
                partition.remove_node(node)

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        """The graph module with all proposed partitions fused, in place."""
        return self.fuse_partitions(self.propose_partitions(), prefix=prefix)

    def _is_node_supported(self, node: Node) -> bool:
        submodules = self._submodules
        if submodules is None:
            submodules = dict(self.graph_module.named_modules())
        return self.operator_support.is_node_supported(submodules, node)

    def _supported(self, program: Program) -> dict[Node, bool]:
        """Whether each node is supported, queried once per node, from the end of the graph on, as torch does."""
        self._submodules = dict(self.graph_module.named_modules())
        try:
            nodes = reversed(program.index.nodes)
            return {
                node: bool(call_user_function(self._is_node_supported, node, node=node, role="operator support"))
                for node in nodes
            }
        finally:
            self._submodules = None

    def _without_single_nodes(self, partitions: list[Partition]) -> list[Partition]:
        """The partitions with more than one call that computes; one that may be alone counts twice."""
        non_compute = NamedOperators((*_NON_COMPUTE_BY_DEFAULT, *self.non_compute_ops))
        alone = NamedOperators(self.allowed_single_node_partition_ops)

        def weight(partition: Partition) -> int:
            calls = [node for node in partition.nodes if node.op.startswith("call_")]
            return sum((not non_compute.names_call(node)) + alone.names_call(node) for node in calls)

        return [partition for partition in partitions if weight(partition) > 1]


class _DependencyViewer:
    """Finds all users of a node, direct or transitive, when queried."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module

    def downstreams_of(self, node: Node) -> set[Node]:
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            for user in waiting.pop().users:
                if user not in found:
                    found.add(user)
                    waiting.append(user)
        return found


def _checked_support(support: OperatorSupportBase) -> OperatorSupportBase:
    if not callable(getattr(support, "is_node_supported", None)):
        raise _SupportError(
            f"operator_support has no attribute 'is_node_supported': {support!r}; give an OperatorSupport of torch's, "
            "or anything with that method"
        )
    return support


class _SupportError(OptionError, AttributeError):
    """An operator support without `is_node_supported`."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """One part: its number, its nodes in graph order, and the getitems that were moved to it."""

    number: int
    nodes: tuple[Node, ...]
    moved: tuple[Node, ...]


def proposal(program: Program, supported: Mapping[Node, bool], *, connected: bool) -> list[Proposed]:
    """The fewest parts that hold all supported nodes, in torch's order: those at the end of the graph first."""
    try:
        parts = _parts(program, supported, _possible_items(program), connected=connected)
    except CycleError:  # Something must run between a node and a getitem of its result.
        parts = _parts(program, supported, {}, connected=connected)
    _take_inputs(program, supported, parts)
    ids, nodes = _ids(program, supported), program.index.nodes
    found = []
    for part in parts:
        searched = frozenset(part.searched)
        found.append(
            Proposed(
                _number_of(program, sorted(searched, reverse=True), ids, connected=connected),
                tuple(nodes[number] for number in part.held if number in searched),
                tuple(nodes[number] for number in part.held if number not in searched),
            )
        )
    return sorted(found, key=lambda part: part.number)


@dataclass(frozen=True, slots=True)
class _Part:
    """The nodes of a part by number: those that it will hold, and those that torch's search puts there at first.

    They differ in getitems, which torch moves to their producer in the end.
    """

    held: list[int]
    searched: list[int]


def _parts(
    program: Program, supported: Mapping[Node, bool], items: Mapping[Node, Node], *, connected: bool
) -> list[_Part]:
    """torch's own parts where those are legal, or else those of the policy; each of `items` beside its source.

    torch's search puts each node into the part of its latest level by data, so levels find the same parts in linear
    time. They are legal unless an effect or a mode forbids it. Connected parts grow as torch's do, along the data
    edges from the last node on.
    """
    accepted = {**supported, **{item: _is_call(source) and supported[source] for item, source in items.items()}}

    def refusal(node: Node) -> str | None:
        return None if accepted[node] else "not supported"

    together = _beside_sources(items)
    units = units_of(program, (refusal,), together=together, modes_apart=True, devices_apart=False)
    if connected:
        grown = grown_parts(units.relation, units.kinds)
        if grown is not None:
            return _parts_by_unit(program, supported, units, grown, _parts_of_items(program, items, units, grown))
    elif len(units.kind_keys) <= 1:
        between = units.relation
        data = Relation(between.order, between.reads, between.readers, between.reads, between.readers)
        levels = latest_levels(data, units.kinds, max(earliest_levels(data, units.kinds), default=0))
        if _is_legal(units, levels):
            return _parts_by_unit(program, supported, units, levels, _levels_of_items(program, items, units, levels))
    policy = ByCapability(refusal, connected=connected, together=together)
    nodes, held_in = program.index.nodes, policy(program).numbers()
    return [_Part(held, [number for number in held if supported[nodes[number]]]) for held in held_in if held]


def _beside_sources(items: Mapping[Node, Node]) -> Callable[[Node], Node | None] | None:
    """A function that keeps each of the items in one unit with its source; None where there are none."""
    calls = {item: source for item, source in items.items() if _is_call(source)}
    sources = calls | {source: source for source in calls.values()}
    return sources.get if sources else None


def _is_call(node: Node) -> bool:
    return node.op.startswith("call_")


def _parts_by_unit(
    program: Program, supported: Mapping[Node, bool], units: Units, part_of: Sequence[int], items: Mapping[int, int]
) -> list[_Part]:
    """The parts, from the part of each unit; `items` maps getitems to where torch's search puts them."""
    nodes = program.index.nodes
    parts: defaultdict[int, _Part] = defaultdict(lambda: _Part([], []))
    for number, unit in enumerate(units.unit_of):
        if unit >= 0 and units.kinds[unit] != REFUSED:
            parts[part_of[unit]].held.append(number)
    for number, unit in enumerate(units.unit_of):
        searched_in = parts.get(items.get(number, part_of[unit])) if unit >= 0 else None
        if searched_in is not None and supported[nodes[number]]:
            searched_in.searched.append(number)
    return list(parts.values())


def _levels_of_items(program: Program, items: Iterable[Node], units: Units, levels: Sequence[int]) -> dict[int, int]:
    """The latest level of each getitem by itself."""
    own = dict[int, int]()
    for item, readers in _readers_of_items(program, items, units):
        own[item] = min((own.get(at, levels[units.unit_of[at]]) for at in readers), default=max(levels, default=0))
    return own


def _parts_of_items(program: Program, items: Iterable[Node], units: Units, part_of: Sequence[int]) -> dict[int, int]:
    """The part in which the search for connected parts puts each getitem at first: that of its first user."""
    unit_of, own = units.unit_of, dict[int, int]()
    for item, readers in _readers_of_items(program, items, units):
        accepted = (at for at in readers if units.kinds[unit_of[at]] != REFUSED)
        own[item] = next((own.get(at, part_of[unit_of[at]]) for at in accepted), part_of[unit_of[item]])
    return own


def _readers_of_items(program: Program, items: Iterable[Node], units: Units) -> Iterator[tuple[int, list[int]]]:
    """Each getitem, the last first, with the nodes in units that read it."""
    nodes, number = program.index.nodes, program.index.number
    for item in sorted((*program.projections, *(number[node] for node in items)), reverse=True):
        yield item, [number[user] for user in nodes[item].users if units.unit_of[number[user]] >= 0]


def _is_legal(units: Units, levels: Sequence[int]) -> bool:
    """Whether levels never fall along a dependency, and rise from refused to supported nodes."""
    before, kinds = units.relation.successors, units.kinds
    return all(
        levels[unit] + (kinds[unit] == REFUSED != kinds[after]) <= levels[after]
        for unit in units.relation.order
        for after in before[unit]
    )


def _take_inputs(program: Program, supported: Mapping[Node, bool], parts: Sequence[_Part]) -> None:
    """Adds each supported placeholder and attribute to the one part that holds all its users; others stay outside."""
    number = program.index.number
    owner = {at: place for place, part in enumerate(parts) for at in part.held}
    for node in (*program.graph.find_nodes(op="placeholder"), *program.graph.find_nodes(op="get_attr")):
        readers = {owner.get(number[user], -1) for user in node.users}
        if supported[node] and len(readers) == 1 and -1 not in readers:
            place = readers.pop()
            parts[place].held.append(number[node])
            parts[place].searched.append(number[node])
    for part in parts:
        part.held.sort()


def _ids(program: Program, supported: Mapping[Node, bool]) -> dict[int, int]:
    """The ids that torch gives supported nodes: their numbers, counted from the end of the graph."""
    nodes = program.index.nodes
    counted = (number for number in reversed(range(len(nodes))) if supported[nodes[number]])
    return {number: place for place, number in enumerate(counted)}


def _number_of(program: Program, numbers: Sequence[int], ids: Mapping[int, int], *, connected: bool) -> int:
    """The id that torch gives a part, which it merges from its last node on, the order of `numbers`.

    The larger of two pieces keeps its id, and of two equal ones the one that came last.
    """
    if not connected:  # Every node joins the one piece.
        return ids[numbers[min(1, len(numbers) - 1)]]
    nodes, place = program.index.nodes, program.index.number
    piece_of: dict[int, int] = {}
    pieces: dict[int, list[int]] = {}
    for number in numbers:
        joined = piece_of[number] = ids[number]
        pieces[joined] = [number]
        users = [piece_of[place[user]] for user in nodes[number].users if place[user] in piece_of]
        for other in dict.fromkeys(users):
            absorbed, joined = (joined, other) if len(pieces[joined]) < len(pieces[other]) else (other, joined)
            piece_of.update(dict.fromkeys(pieces[absorbed], joined))
            pieces[joined] += pieces.pop(absorbed)
    return max(pieces, key=lambda piece: len(pieces[piece]))


def _possible_items(program: Program) -> dict[Node, Node]:
    """Each getitem that is not known to take an item of a container, with the node whose result may be one."""
    known = frozenset(program.index.nodes[number] for number in program.projections)
    found: dict[Node, Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        if node in known or not isinstance(source, Node) or not all(map(_takes_item, source.users)):
            continue
        if source in found:
            found[node] = found[source]
        elif _may_be_container(source):
            found[node] = source
    return found


def _may_be_container(node: Node) -> bool:
    if node.op in ("call_module", "placeholder"):
        return value_of(node) is None
    is_call = node.op in ("call_function", "call_method") and node.target is not operator.getitem
    return is_call and value_of(node) is None and may_return_container(node.target)


def _takes_item(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def checked_names(names: Sequence[str] | None, role: str) -> Sequence[str]:
    """`names` itself, when it is a collection of names; none if it is None."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise OptionError(f"{role} is a list of names of functions, like ['torch.ops.aten.view'], not {names!r}")
    return [] if names is None else names


@final
class NamedOperators:
    """The functions with these names; the name of an operator stands for all of its overloads."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        # By identity, since hashing an operator is slow; the graph keeps the targets alive meanwhile.
        self._known: dict[int, bool] = {}

    def __contains__(self, node: Node) -> bool:
        """Whether `node` calls one of the functions."""
        if not self.names or node.op != "call_function":
            return False
        key = id(node.target)
        if key not in self._known:
            self._known[key] = not self.names.isdisjoint(qualified_names(node))
        return self._known[key]

    def names_call(self, node: Node) -> bool:
        """Whether `node` calls one of the functions, as a function or as a method of a tensor."""
        return node in self or (node.op == "call_method" and f"torch.ops.aten.{node.target}" in self.names)


def bookends(
    nodes: Collection[Node], non_compute: NamedOperators, kept_in_order: Mapping[Node, Sequence[Node]]
) -> set[Node]:
    """The non-compute nodes whose inputs in `nodes` are all such nodes, and those whose users in `nodes` all are.

    What must stay before a node by its effects counts as an input, and what must stay after it as a user:
    `kept_in_order` has the latter.
    """
    inside, in_order = frozenset(nodes), sorted(nodes)
    earlier = defaultdict[Node, list[Node]](list)
    for node in in_order:
        for after in kept_in_order.get(node, ()):
            earlier[after].append(node)
    leading: set[Node] = set()
    for node in in_order:
        reads = (*node.all_input_nodes, *earlier.get(node, ()))
        if node in non_compute and all(_is_beyond(read, inside, leading) for read in reads):
            leading.add(node)
    trailing: set[Node] = set()
    for node in reversed(in_order):
        users = (*node.users, *kept_in_order.get(node, ()))
        if node in non_compute and all(_is_beyond(user, inside, trailing) for user in users):
            trailing.add(node)
    return leading | trailing


def _is_beyond(node: Node, inside: frozenset[Node], border: set[Node]) -> bool:
    return node not in inside or node in border or node.op == "placeholder"
