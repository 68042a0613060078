"""What a treatment is: it decides what is called in the place of a region, or marks the region's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import nn
from torch.fx import GraphModule

from partita.graphs.tolerance import Tolerance
from partita.regions import Region

__all__ = ["Treatment"]


@runtime_checkable
class Treatment(Protocol):
    """What happens to a region; implement it as a frozen dataclass of plain values."""

    @property
    def tolerance(self) -> Tolerance:
        """How far the treatment may change numbers."""

    @property
    def mixes_modes(self) -> bool:
        """Whether one body may hold nodes of several grad, inference or autocast modes."""

    def treat(self, body: GraphModule) -> nn.Module:
        """What is called in the place of the region: `body` itself, or something that means the same."""

    def marks(self, region: Region) -> Mapping[str, object]:
        """Metadata for every node of the region; empty for a treatment that does not mark."""
