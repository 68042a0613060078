"""Whether two programs mean the same: values, gradients, state, aliasing, random state and ambient modes."""

from __future__ import annotations

from partita.analysis.tolerance import Tolerance
from partita.equivalence.bisect import Bisection, bisect
from partita.equivalence.compare import compare
from partita.equivalence.differences import Comparison, Difference
from partita.equivalence.verify import verify

__all__ = ["Bisection", "Comparison", "Difference", "Tolerance", "bisect", "compare", "verify"]
