"""Policies: functions from a program to a partition."""

import warnings

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


def __getattr__(name: str) -> type[SplitAt]:
    """The policy that `Sequential` was renamed to, since a star import must not hide `torch.nn.Sequential`."""
    if name == "Sequential":
        warnings.warn("partita.policies.Sequential is SplitAt now", DeprecationWarning, stacklevel=2)
        return SplitAt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
