"""Mark: the region's nodes get metadata, for others to act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from partita.regions import Region

__all__ = ["Mark"]


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """Writes `value`, or the region's name where none is given, under `key` in the metadata of every node."""

    key: str
    value: object = None

    def marks(self, region: Region) -> Mapping[str, object]:
        return {self.key: region.name if self.value is None else self.value}
