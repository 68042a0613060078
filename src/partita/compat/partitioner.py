"""A drop-in replacement for `torch.fx.passes.infra.partitioner`, with its names, arguments and results."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from partita._torch.gc_pause import gc_paused
from partita.compat._fused_groups import FusionError, checked_module
from partita.compat._proposal import NamedOperators, bookends, checked_names, proposal
from partita.compat.fuser_utils import fuse_by_partitions
from partita.errors import OptionError
from partita.policies.legalize import call_user_function
from partita.program.program import Program, program_being_edited

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
        """Removes from each partition the `non_compute_ops` at its borders."""
        non_compute = NamedOperators(self.non_compute_ops)
        for partition in partitions:
            for node in bookends(partition.nodes, non_compute):
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
