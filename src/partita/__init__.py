"""Partita cuts PyTorch graphs into regions, gives each a treatment, and checks that the program still means the same."""

from partita.graphs.program import Program
from partita.plans import Plan, plan
from partita.regions import Partition, Region

__all__ = ["Partition", "Plan", "Program", "Region", "plan"]
