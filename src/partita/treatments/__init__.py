"""Treatments: what happens to a region, and what a recomputed one keeps."""

from partita.plans import Treatment
from partita.treatments.call import Call
from partita.treatments.keep import (
    Keep,
    KeepAtMost,
    KeepEverything,
    KeepExpensive,
    KeepNodes,
    KeepNothing,
    KeepOperators,
)
from partita.treatments.lower import Lower
from partita.treatments.mark import Mark
from partita.treatments.mode import Mode
from partita.treatments.recompute import Recompute

__all__ = [
    "Call",
    "Keep",
    "KeepAtMost",
    "KeepEverything",
    "KeepExpensive",
    "KeepNodes",
    "KeepNothing",
    "KeepOperators",
    "Lower",
    "Mark",
    "Mode",
    "Recompute",
    "Treatment",
]
