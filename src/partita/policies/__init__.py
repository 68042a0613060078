"""Policies: who decides what a region is."""

from partita.plans import Policy
from partita.policies.around_operators import AroundOperators
from partita.policies.by_annotation import ByAnnotation
from partita.policies.by_capability import ByCapability
from partita.policies.by_label import ByLabel
from partita.policies.by_mode import ByMode
from partita.policies.by_module import ByModule
from partita.policies.by_size import BySize
from partita.policies.in_forward import InForward
from partita.policies.sequential import Sequential

__all__ = [
    "AroundOperators",
    "ByAnnotation",
    "ByCapability",
    "ByLabel",
    "ByMode",
    "ByModule",
    "BySize",
    "InForward",
    "Policy",
    "Sequential",
]
