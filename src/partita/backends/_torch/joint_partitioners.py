"""torch's own way to cut a joint graph in two, and how Inductor knows a partitioner by which it may do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["drop_forward_effects", "is_any_recomputed", "let_inductor_take", "min_cut_partition", "plain_partition"]


def min_cut_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that computes again what is marked so, and what is cheap, with little held between."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def plain_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that compute each node where it was traced, with all that the backward reads held."""
    from torch._functorch.partitioners import default_partition

    options.pop("compiler", None)  # Only the min-cut partitioner looks at it.
    return default_partition(joint, inputs, **options)


def drop_forward_effects(backward: GraphModule) -> None:
    """Takes unused calls of the forward out of a backward graph, and what only they read.

    torch's partitioners (2.13) keep asserts, random operators and other side effects of the forward in the backward too
    wherever it has what they need; an assert brings the random operators that it depends on. Eager mode runs them once.
    """
    unused = False
    for node in reversed(backward.graph.nodes):
        if node.op == "call_function" and not node.users and (_is_of_forward(node) or _is_seeded(node)):
            backward.graph.erase_node(node)
            unused = True
    if unused:
        backward.recompile()


def _is_of_forward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def _is_seeded(node: Node) -> bool:
    """Whether a node draws random numbers; decompositions and passes of a compiler may have lost its tag."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_any_recomputed(joint: GraphModule) -> bool:
    """Whether a node is marked, so that torch's partitioners recompute it."""
    from torch._functorch.partitioners import has_recomputable_ops

    return has_recomputable_ops(joint)


def let_inductor_take(partitioner: type[Callable[..., Any]]) -> None:
    """Lets `torch._inductor.config.custom_partitioner_fn` hold partitioners of this class; they need a `uuid`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(partitioner)
