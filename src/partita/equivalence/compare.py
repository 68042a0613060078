"""Comparing: whether two programs mean the same, as far as calls on the given arguments can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from partita.equivalence.findings import Comparison, Difference
from partita.equivalence.inputs import arguments_of
from partita.equivalence.run import Call
from partita.equivalence.subject import Comparable, subject_of
from partita.equivalence.trial import pair_of, tried, tried_on_other_shapes
from partita.errors import OptionError, VerificationError
from partita.graphs.tolerance import Tolerance

__all__ = ["compare", "verify"]


def compare(
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
) -> Comparison:
    """Everything that differs between calls of the two programs, bit by bit unless a tolerance is given or declared.

    Both run from the same state, inputs and random state, all of which are afterwards as they were. Memory is copied
    only for state and inputs that may be written. The calls: the arguments as given, with gradients; then other data
    on the state which that left; the arguments under no_grad; other sizes where the graph has symbols for them.
    """
    if not isinstance(args, tuple | list):
        raise OptionError(f"`args` is a tuple of arguments, not a {type(args).__name__}; for a single one write (x,)")
    arguments = arguments_of(args, kwargs)
    pair = pair_of(subject_of(before), subject_of(after), arguments, tolerance=tolerance)
    callers = (pair.before.caller_grad, pair.after.caller_grad)
    gradients = gradients and False not in callers
    grad = gradients or (torch.is_grad_enabled() and False not in callers)
    first = [Call("first call", arguments, grad, backward=gradients)]
    if second_call:
        first.append(Call("second call, other data", arguments, grad, backward=gradients, other_data=True))
    found = [tried(pair, first)]
    if no_grad_call and grad and True not in callers:
        found.append(tried(pair, [Call("under no_grad", arguments, grad=False)]))
    if other_shapes:
        found.append(tried_on_other_shapes(pair, Call("", arguments, grad, backward=gradients)))
    return _merged([Comparison((), pair.notes), *found])


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
) -> Comparison:
    """The comparison of two programs that mean the same; raises `VerificationError` if they do not.

    It raises as well where the original fails in every call, since then nothing was verified.
    """
    comparison = compare(
        before,
        after,
        args,
        kwargs,
        tolerance=tolerance,
        gradients=gradients,
        second_call=second_call,
        no_grad_call=no_grad_call,
        other_shapes=other_shapes,
    )
    if not comparison.equal:
        raise VerificationError(f"the programs do not mean the same: {comparison}")
    if comparison.calls and comparison.raised == comparison.calls:
        raise VerificationError(f"nothing could be compared, give arguments that the original accepts: {comparison}")
    return comparison


def _merged(parts: Sequence[Comparison]) -> Comparison:
    """All parts as one; what differs in several calls is told once."""
    told: dict[tuple[str, str], Difference] = {}
    for part in parts:
        for difference in part.differences:
            told.setdefault((difference.kind, difference.where), difference)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    calls, raised = sum(part.calls for part in parts), sum(part.raised for part in parts)
    return Comparison(tuple(told.values()), notes, calls, raised)
