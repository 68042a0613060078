"""Treatments: what happens to a region."""

from partita.treatments.call import Call
from partita.treatments.mark import Mark

__all__ = ["Call", "Mark"]
