"""Treatments: what happens to a region."""

from partita.plans import Treatment
from partita.treatments.call import Call
from partita.treatments.lower import Lower
from partita.treatments.mark import Mark
from partita.treatments.mode import Mode

__all__ = ["Call", "Lower", "Mark", "Mode", "Treatment"]
