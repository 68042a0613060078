"""Regions and partitions: what is cut out, and whether it can be."""

from partita.regions.partition import Partition
from partita.regions.region import Region

__all__ = ["Partition", "Region"]
