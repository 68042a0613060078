"""Treatments: what happens to a region."""

from partita.plans import Treatment
from partita.treatments.call import Call
from partita.treatments.mark import Mark
from partita.treatments.mode import Mode

__all__ = ["Call", "Mark", "Mode", "Treatment"]
