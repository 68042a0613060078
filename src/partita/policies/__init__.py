"""Policies: functions from a program to a partition."""

from partita.plans import Policy
from partita.policies.around_operators import AroundOperators
from partita.policies.by_capability import ByCapability
from partita.policies.by_label import ByAnnotation, ByLabel, InForward
from partita.policies.by_mode import ByMode
from partita.policies.by_module import ByModule
from partita.policies.in_order import BySize, SplitAt
from partita.policies.repeats import Repeats

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
    "Repeats",
    "SplitAt",
]
