"""The public names of the treatments: what happens to a region, and what a recomputed one keeps."""

from partita.lowering.delegate import Delegate
from partita.lowering.lower import Lower
from partita.plans import Treatment
from partita.recompute import (
    Keep,
    KeepAtMost,
    KeepEverything,
    KeepExpensive,
    KeepNodes,
    KeepNothing,
    KeepOperators,
    Recompute,
)
from partita.treatments.basic import Call, LeaveEager, Mark, Mode

__all__ = [
    "Call",
    "Delegate",
    "Keep",
    "KeepAtMost",
    "KeepEverything",
    "KeepExpensive",
    "KeepNodes",
    "KeepNothing",
    "KeepOperators",
    "LeaveEager",
    "Lower",
    "Mark",
    "Mode",
    "Recompute",
    "Treatment",
]
