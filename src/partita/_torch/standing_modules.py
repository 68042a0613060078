"""Modules that stand for a body: they run something else in its place that means the same."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

__all__ = ["StandsForBody"]


class StandsForBody(nn.Module):
    """A module whose calls do what those of `body` do, which holds the state."""

    body: GraphModule
