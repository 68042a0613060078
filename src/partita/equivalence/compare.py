"""Comparing: whether two programs mean the same, as far as calls on the given arguments can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from partita.equivalence.differences import differences
from partita.equivalence.findings import Comparison, Difference, Tolerance
from partita.equivalence.inputs import Arguments, arguments_of
from partita.equivalence.observation import Observation
from partita.equivalence.other_shapes import resized
from partita.equivalence.pairing import Pairing, paired
from partita.equivalence.randomness import random_state
from partita.equivalence.run import Call, Start, Watched, run
from partita.equivalence.snapshot import snapshot_of
from partita.equivalence.storages import storage_key
from partita.equivalence.subject import Comparable, Subject, subject_of
from partita.errors import VerificationError

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
    """Everything that differs between calls of the two programs, bit by bit unless a tolerance is given.

    Both run from the same state, inputs and random state, all of which are afterwards as they were. Memory is copied
    only for state and inputs that may be written. The calls: the arguments as given, with gradients; then other data
    on the state which that left; the arguments under no_grad; other sizes where the graph has symbols for them.
    """
    pair = _pair_of(subject_of(before), subject_of(after))
    arguments = arguments_of(args, kwargs)
    grad = gradients or torch.is_grad_enabled()
    first = [Call("first call", arguments, grad, backward=gradients)]
    if second_call:
        first.append(Call("second call, other data", arguments, grad, backward=gradients, other_data=True))
    found = [_tried(pair, first, tolerance)]
    if no_grad_call and grad:
        found.append(_tried(pair, [Call("under no_grad", arguments, grad=False)], tolerance))
    if other_shapes:
        found.append(_tried_on_other_shapes(pair, Call("", arguments, grad, backward=gradients), tolerance))
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
    """The comparison of two programs that mean the same; raises `VerificationError` if they do not."""
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
    return comparison


@dataclass(frozen=True, slots=True)
class _Pair:
    before: Subject
    after: Subject
    before_state: tuple[Watched, ...]
    after_state: tuple[Watched, ...]
    start: Start
    notes: tuple[str, ...]


def _pair_of(before: Subject, after: Subject) -> _Pair:
    restored = before.written | after.written
    slots = (*before.slots, *after.slots)
    keys = frozenset(key for slot in slots if (key := storage_key(slot.tensor)) is not None)
    roots = [subject.root for subject in (before, after) if subject.root is not None]
    pairing = paired(before.slots, after.slots)
    one, other = _watched(pairing, restored)
    start = Start(snapshot_of(roots, slots, written=restored), random_state(), keys, restored)
    return _Pair(before, after, one, other, start, pairing.notes)


def _watched(pairing: Pairing, restored: frozenset[int]) -> tuple[tuple[Watched, ...], tuple[Watched, ...]]:
    """Both sides of the pairing, under the original's names; a place is written if either program may write it."""
    ones: list[Watched] = []
    others: list[Watched] = []
    for one, other in zip(pairing.before, pairing.after, strict=True):
        may_be_written = any(storage_key(slot.tensor) in restored for slot in (one, other))
        for slot, side in ((one, ones), (other, others)):
            side.append(Watched(one.name, one.label, slot, may_be_written, slot.tensor.grad_fn is not None))
    return tuple(ones), tuple(others)


def _tried(pair: _Pair, calls: Sequence[Call], tolerance: Tolerance | None) -> Comparison:
    ones = run([pair.before, pair.after], pair.before_state, calls, pair.start)
    return _against(pair, calls, ones, tolerance)


def _against(
    pair: _Pair, calls: Sequence[Call], ones: Sequence[Observation], tolerance: Tolerance | None
) -> Comparison:
    others = run([pair.after, pair.before], pair.after_state, calls, pair.start)
    found: list[Difference] = []
    notes: list[str] = []
    for call, one, other in zip(calls, ones, others, strict=True):
        names = _output_nodes(pair.before, one)
        for difference in differences(one, other, tolerance):
            where = names.get(difference.where, difference.where)
            found.append(replace(difference, where=where, when=call.name))
        notes += _exceptions(call, one)
    return Comparison(tuple(found), tuple(notes), len(calls))


def _tried_on_other_shapes(pair: _Pair, call: Call, tolerance: Tolerance | None) -> Comparison:
    """The first other sizes that the original accepts, compared."""
    tried = []
    for words, arguments in _other_sizes(pair, call.arguments):
        other = replace(call, name=f"with {words}", arguments=arguments)
        ones = run([pair.before, pair.after], pair.before_state, [other], pair.start)
        if ones[0].raised is None:
            return _against(pair, [other], ones, tolerance)
        tried.append(f"{words} ({ones[0].raised})")
    return Comparison((), tuple([f"the original accepts no other sizes: {'; '.join(tried)}"] if tried else []))


def _other_sizes(pair: _Pair, arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    for subject in (pair.before, pair.after):
        found = False
        for sizes in resized(arguments, subject.placeholders):
            found = True
            yield sizes
        if found:
            return


def _output_nodes(subject: Subject, observation: Observation) -> dict[str, str]:
    """Each output's place with the name of the node that gives it, where the graph tells."""
    if len(subject.output_names) != len(observation.outputs):
        return {}
    pairs = zip(observation.outputs, subject.output_names, strict=True)
    return {place: f"{place} (node {name!r})" for (place, _), name in pairs if name}


def _exceptions(call: Call, seen: Observation) -> list[str]:
    return [
        f"{call.name}: {what} raises {raised}, so less could be compared"
        for what, raised in (("the original", seen.raised), ("the original's backward", seen.backward_raised))
        if raised is not None
    ]


def _merged(parts: Sequence[Comparison]) -> Comparison:
    """All parts as one; what differs in several calls is told once."""
    told: dict[tuple[str, str], Difference] = {}
    for part in parts:
        for difference in part.differences:
            told.setdefault((difference.kind, difference.where), difference)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Comparison(tuple(told.values()), notes, sum(part.calls for part in parts))
