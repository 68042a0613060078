"""Raises where two programs do not mean the same, and names the region that differs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from partita.analysis.tolerance import Tolerance
from partita.equivalence.bisect import Bisection, Compared, Trials, region_to_blame
from partita.equivalence.compare import compare
from partita.equivalence.differences import Comparison
from partita.equivalence.observe import Comparable
from partita.errors import VerificationError
from partita.plans.compilations import logged_once
from partita.plans.plan import plan_applied_to_make
from partita.program.program import Program

_LOG = logging.getLogger(__name__)


def verify(
    before: Comparable,
    after: Comparable,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    tolerance: Tolerance | None = None,
    gradients: bool = True,
    second_call: bool = True,
    no_grad_call: bool = True,
    other_shapes: bool = True,
    locate: bool = True,
) -> Comparison:
    """The comparison of two programs that mean the same; raises `VerificationError` if they do not.

    Example::

        partita.verify(program, plan.apply(), (x,))  # by the tolerance that the treatments declare
        partita.verify(model, program, (x,), tolerance=partita.Tolerance())  # the same bits

    If `after` is the result of a plan whose program is still there, the error names the region that differs: halves of
    the plan are applied and compared until one region is left. `locate=False` saves these runs. It raises as well where
    the original fails in every call, since then nothing was verified.
    """
    compared = partial(
        compare,
        args=args,
        kwargs=kwargs,
        tolerance=tolerance,
        gradients=gradients,
        second_call=second_call,
        no_grad_call=no_grad_call,
        other_shapes=other_shapes,
    )
    where = None
    with logged_once():
        comparison = compared(before, after)
        if not comparison.equal and locate and isinstance(after, Program):
            where = located(after, compared)
    if not comparison.equal:
        said = f"\n{where}" if where else ""
        if where is not None and where.found.blame in ("region", "cut"):
            said += "; partita.bisect(plan, args) names its operators"
        raise VerificationError(f"the programs do not mean the same: {comparison}{said}")
    if comparison.calls and comparison.raised == comparison.calls:
        why = comparison.notes[0] if comparison.notes else "it raises in every call"
        raise VerificationError(f"nothing could be compared, give arguments that the original accepts: {why}")
    return comparison


@final
@dataclass(frozen=True, slots=True)
class Location:
    """Which region of the plan that made a program differs; prints as a line."""

    found: Bisection
    runs: int

    def __str__(self) -> str:
        found = self.found
        if found.blame == "nothing":
            return "the plan changes nothing: the program that it was applied to differs from the original already"
        if found.blame == "program":
            return "the program differs from itself when it is called twice, so no region is to blame"
        names = ", ".join(repr(region.name) for region in found.regions)
        runs = f"found in {self.runs} run{'' if self.runs == 1 else 's'}"
        if found.blame == "combination":
            return f"no region differs by itself ({runs})"
        why = "although it is not treated" if found.blame == "cut" else f"treated by {found.plan_treatment!r}"
        return f"region {names} differs by itself, {why} ({runs})"


def located(after: Program, compared: Compared) -> Location | None:
    """Which region of the plan that made `after` differs; None if there is no such plan, or it cannot be found."""
    try:
        plan = plan_applied_to_make(after)
        if plan is None or not len(plan.partition):
            return None
        trials = Trials(plan, compared)
        return Location(region_to_blame(plan, trials), trials.runs)
    except Exception as error:  # What differs is known, and must be reported whatever fails here.
        _LOG.debug("the region that differs was not found: %s", error)
        return None
