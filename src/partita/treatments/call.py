"""Call: the region runs as it is, as a submodule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch.fx import GraphModule

__all__ = ["Call"]


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Calls the body itself; same bits, any modes."""

    def treat(self, body: GraphModule) -> GraphModule:
        return body
