"""Whether calling a graph module runs its graph, and nothing else."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from partita._torch.interposed import interposed

__all__ = ["runs_its_graph"]


def runs_its_graph(module: nn.Module) -> bool:
    """No hook, no `forward` put on the instance and no compiled call stands between a call and the graph."""
    return isinstance(module, GraphModule) and interposed(module) is None
