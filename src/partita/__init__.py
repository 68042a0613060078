"""Partita cuts PyTorch graphs into regions, gives each a treatment, and checks that the program means the same."""

from partita.equivalence import Comparison, Tolerance, compare, verify
from partita.graphs.fingerprint import fingerprint
from partita.graphs.program import Program
from partita.plans import Plan, Policy, Treatment, plan
from partita.regions import Partition, Region
from partita.rewrite import gather, inline, outline

__all__ = [
    "Comparison",
    "Partition",
    "Plan",
    "Policy",
    "Program",
    "Region",
    "Tolerance",
    "Treatment",
    "compare",
    "fingerprint",
    "gather",
    "inline",
    "outline",
    "plan",
    "verify",
]
