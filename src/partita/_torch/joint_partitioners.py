"""torch's own way to cut a joint graph in two, and how Inductor knows a partitioner by which it may do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

__all__ = ["is_any_recomputed", "let_inductor_take", "min_cut_partition", "plain_partition"]


def min_cut_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that computes again what is marked so, and what is cheap, with little held between."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def plain_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that compute each node where it was traced, with all that the backward reads held."""
    from torch._functorch.partitioners import default_partition

    options.pop("compiler", None)  # Only the min-cut partitioner looks at it.
    return default_partition(joint, inputs, **options)


def is_any_recomputed(joint: GraphModule) -> bool:
    """Whether a node is marked, so that torch's partitioners recompute it."""
    from torch._functorch.partitioners import has_recomputable_ops

    return has_recomputable_ops(joint)


def let_inductor_take(partitioner: type[Callable[..., Any]]) -> None:
    """Lets `torch._inductor.config.custom_partitioner_fn` hold partitioners of this class; they need a `uuid`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(partitioner)
