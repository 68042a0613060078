"""Torch's partitioners of joint graphs into a forward and a backward, and what they leave in the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from partita.backends._torch.support import is_random


def min_cut_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that recomputes what is marked and what is cheap, to save few bytes for backward."""
    from functorch.compile import min_cut_rematerialization_partition

    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
    return parts


def plain_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward without recomputation: all that the backward reads is saved."""
    from functorch.compile import default_partition

    options.pop("compiler", None)  # Only the min-cut partitioner reads it.
    _read_unused_random_numbers(joint)
    parts: tuple[GraphModule, GraphModule] = default_partition(joint, inputs, **options)
    return parts


def _read_unused_random_numbers(joint: GraphModule) -> None:
    """Adds an item of each unused random result of several tensors: torch's partitioner (2.13) fails without one."""
    for node in joint.graph.nodes:
        values = node.meta.get("val")
        if isinstance(values, tuple | list) and not node.users and is_random(node.target):
            with joint.graph.inserting_after(node):
                item = joint.graph.call_function(operator.getitem, (node, 0))
            item.meta = {**node.meta, "val": values[0]}
            item.meta.pop("tensor_meta", None)


def partition_saving(
    joint: GraphModule, inputs: Sequence[Any], choose: Callable[[GraphModule], Sequence[Node]], **options: Any
) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward between which exactly the values that `choose` returns are saved, and needed inputs.

    `choose` gets the joint graph as torch's partitioner has prepared it. torch has no public way to set saved values
    (2.13): its min-cut partitioner calls a function of its own, which is replaced meanwhile.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch import partitioners

    def chosen(graph: Any, node_info: Any, memory_budget: float = 1) -> list[Node]:
        prepared = joint if joint.graph is graph else graph.owning_module
        saved = set(choose(prepared))
        saved.update(node for node in node_info.inputs)
        return [node for node in graph.nodes if node in saved]

    with _LOCK:
        before = partitioners.choose_saved_values_set
        partitioners.choose_saved_values_set = chosen  # type: ignore[assignment]
        try:
            parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
            return parts
        finally:
            partitioners.choose_saved_values_set = before


#: Joint graphs are partitioned one at a time while torch's choice is replaced.
_LOCK = RLock()


def is_any_recomputed(joint: GraphModule) -> bool:
    """Whether any node is marked for recomputation by torch's partitioners."""
    wanted = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return any(node.meta.get("recompute") in wanted for node in joint.graph.nodes)


def drop_forward_effects(backward: GraphModule) -> None:
    """Removes dead calls of the forward from a backward graph, and what only they read.

    torch's partitioners (2.13) keep asserts, random operators and other side effects of the forward in the backward too
    wherever it has what they need; an assert brings the random operators that it depends on. Eager mode runs them once.
    """
    unused = False
    for node in reversed(backward.graph.nodes):
        # Decompositions and passes of a compiler may have lost the tag of a random operator.
        if node.op == "call_function" and not node.users and (_is_of_forward(node) or is_random(node.target)):
            backward.graph.erase_node(node)
            unused = True
    if unused:
        backward.recompile()


def _is_of_forward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def let_inductor_take(partitioner: type[Callable[..., Any]]) -> None:
    """Lets `torch._inductor.config.custom_partitioner_fn` hold partitioners of this class; they need a `uuid`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(partitioner)
