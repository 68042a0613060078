"""Whether two programs mean the same: values, gradients, state, aliasing, random state and ambient modes."""

from __future__ import annotations

from partita.equivalence.compare import compare, verify
from partita.equivalence.findings import Comparison, Difference
from partita.graphs.tolerance import Tolerance

__all__ = ["Comparison", "Difference", "Tolerance", "compare", "verify"]
