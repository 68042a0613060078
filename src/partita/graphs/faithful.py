"""Whether calling a graph module runs its graph, and nothing else."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

__all__ = ["runs_its_graph"]


def runs_its_graph(module: nn.Module) -> bool:
    """No hook, no `forward` put on the instance and no compiled call stands between a call and the graph."""
    return (
        isinstance(module, GraphModule)
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and not any((module._forward_hooks, module._forward_pre_hooks))
        and not any((module._backward_hooks, module._backward_pre_hooks))
    )
