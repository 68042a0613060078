"""Partita cuts PyTorch graphs into regions, gives each a treatment, and checks that the program means the same."""

from partita import hops
from partita.equivalence import Comparison, Tolerance, compare, verify
from partita.graphs.fingerprint import fingerprint
from partita.graphs.program import Program
from partita.plans import Plan, Policy, Treatment, mode_tree, plan
from partita.regions import Partition, Region
from partita.rewrite import dissolve, gather, inline, outline
from partita.tracing import capture, capture_joint

__all__ = [
    "Comparison",
    "Partition",
    "Plan",
    "Policy",
    "Program",
    "Region",
    "Tolerance",
    "Treatment",
    "capture",
    "capture_joint",
    "compare",
    "dissolve",
    "fingerprint",
    "gather",
    "hops",
    "inline",
    "mode_tree",
    "outline",
    "plan",
    "verify",
]
