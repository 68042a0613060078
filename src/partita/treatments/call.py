"""Call: the region runs as it is, as a submodule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch.fx import GraphModule

from partita.graphs.tolerance import EXACT, Tolerance
from partita.regions import Region

__all__ = ["Call"]


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Calls the body itself; same bits, any modes."""

    tolerance: ClassVar[Tolerance] = EXACT
    mixes_modes: ClassVar[bool] = True

    def treat(self, body: GraphModule) -> GraphModule:
        return body

    def marks(self, region: Region) -> Mapping[str, object]:
        return {}
