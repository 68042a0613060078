"""Compares two programs by the same calls of both, from the same state, inputs and RNG state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from partita._torch.symbolic_shapes import symbols_in
from partita._torch.tensors import plain_tensors
from partita.analysis.nodes import value_of
from partita.analysis.tolerance import Tolerance
from partita.equivalence.ambient import generators_of, random_state
from partita.equivalence.differences import Comparison, Difference, differences, uncompared
from partita.equivalence.inputs import SAME_DATA, Arguments, arguments_of, resized
from partita.equivalence.observe import Call, Comparable, Observation, Start, Subject, Watched, run, subject_of
from partita.equivalence.other_data import refused
from partita.equivalence.state import Pairing, Places, paired, snapshot_of, storage_key
from partita.errors import OptionError

#: What a difference is called that shows in the call under no_grad.
UNDER_NO_GRAD = "under no_grad"


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
    """Everything that differs between calls of the two programs, bit by bit unless a tolerance is passed or declared.

    Example::

        found = partita.compare(model, lambda x: model(x) * 1.001, (x,))
        print(found.equal, found.calls)
        print(found.differences[0])  # what differs, where, how far, and in which call

    Both run from the same state, inputs and random state, all of which are afterwards as they were. Memory is copied
    only for state and inputs that may be mutated. The calls: the arguments with gradients; then other data on the
    state that the first call left; the arguments under no_grad; other sizes where the graph has symbols for them.
    Other data are of the same kind, such as other indices of the same range; `notes` name the tensors that keep theirs.
    """
    pair, first, without_grad, other = _calls_of(before, after, args, kwargs, tolerance, gradients=gradients)
    found = [_compared(pair, first if second_call else first[:1])]
    if no_grad_call and without_grad:
        found.append(_compared(pair, without_grad))
    if other_shapes:
        found.append(_compared_on_other_sizes(pair, other))
    return _merged([Comparison((), pair.notes), *found])


def replay(
    before: Comparable,
    after: Comparable,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    *,
    gradients: bool,
    last: str,
    on_call: Callable[[str], None],
) -> None:
    """Makes all calls of a comparison, of `after` alone, until the one whose name is `last`; each is announced."""
    pair, first, without_grad, other = _calls_of(before, after, args, kwargs, None, gradients=gradients)
    if last != first[0].name:
        first = list(_accepted(pair, first)[0])
    sizes = _other_sizes(pair, other.arguments)
    resized = ([replace(other, name=_with(words), arguments=sized)] for words, sized in sizes)
    for calls in (first, without_grad, *(session for session in resized if session[0].name == last)):
        names = [call.name for call in calls]
        until = names.index(last) + 1 if last in names else len(names)
        announced = iter(names)

        def call(*args: Any, announced: Iterator[str] = announced, **kwargs: Any) -> object:
            on_call(next(announced))
            return pair.after.call(*args, **kwargs)

        run([replace(pair.after, call=call), pair.before], pair.after_state, calls[:until], pair.start)
        if last in names:
            return


def _calls_of(
    before: Comparable,
    after: Comparable,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    tolerance: Tolerance | None,
    *,
    gradients: bool,
) -> tuple[_Pair, list[Call], list[Call], Call]:
    """The pair; the calls that follow each other, that under no_grad, if any; and the one to make with other sizes."""
    if not isinstance(args, tuple | list):
        raise OptionError(f"`args` is a tuple of arguments, not a {type(args).__name__}; for a single one write (x,)")
    arguments = arguments_of(args, kwargs)
    pair = _pair_of(subject_of(before), subject_of(after), arguments, tolerance=tolerance)
    callers = (pair.before.caller_grad, pair.after.caller_grad)
    gradients = gradients and False not in callers
    grad = gradients or (torch.is_grad_enabled() and False not in callers)
    call = Call("first call", arguments, grad, backward=gradients)
    second = replace(call, name="second call, other data", other_data=True)
    without_grad = [Call(UNDER_NO_GRAD, arguments, grad=False)] if grad and True not in callers else []
    return pair, [call, second], without_grad, replace(call, name="")


def _with(words: str) -> str:
    return f"with {words}"


def _merged(parts: Sequence[Comparison]) -> Comparison:
    """All parts as one; what differs in several calls is reported once."""
    found: dict[tuple[str, str], Difference] = {}
    for part in parts:
        for difference in part.differences:
            found.setdefault((difference.kind, difference.where), difference)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    calls, raised = sum(part.calls for part in parts), sum(part.raised for part in parts)
    return Comparison(tuple(found.values()), notes, calls, raised)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two programs with their state tensors paired, and the start of all their runs."""

    before: Subject
    after: Subject
    before_state: tuple[Watched, ...]
    after_state: tuple[Watched, ...]
    start: Start
    tolerance: Tolerance
    notes: tuple[str, ...]


def _pair_of(before: Subject, after: Subject, arguments: Arguments, *, tolerance: Tolerance | None) -> _Pair:
    """A pair ready to run; without a tolerance, the one that the programs themselves declare."""
    restored = before.mutated | after.mutated
    slots = (*before.slots, *after.slots)
    plain = (tensor for slot in slots for tensor in plain_tensors(slot.tensor))
    keys = frozenset(key for tensor in plain if (key := storage_key(tensor)) is not None)
    roots = [subject.root for subject in (before, after) if subject.root is not None]
    pairing = paired(before.slots, after.slots)
    one, other = _watched(pairing, restored)
    allowed = before.tolerance | after.tolerance if tolerance is None else tolerance
    random = random_state(generators_of(roots, arguments.tree.leaves))
    places = _places_of(before, after, pairing)
    start = Start(snapshot_of(roots, slots, mutated=restored), random, keys, restored, places)
    return _Pair(before, after, one, other, start, allowed, pairing.notes)


def _places_of(before: Subject, after: Subject, pairing: Pairing) -> Places:
    """Where the modules of the original hold tensors, and where those of the other program do that stand for them.

    What only the other program has, a delegate say, may hold what it likes.
    """
    ones, others = _named_modules(before), _named_modules(after)
    names = {id(module): name for name, module in ones}
    originals = dict(reversed(ones))
    twins = {id(there.owner): here.owner for here, there in zip(pairing.before, pairing.after, strict=True)}
    found = list(ones)
    for name, module in others:
        own = ".".join(part for part in name.split(".") if part != "_orig_mod")  # As torch.compile calls it.
        for here in (originals.get(own), twins.get(id(module))):
            if id(module) not in names and here is not None and (type(here) is type(module) or not name):
                names[id(module)] = names[id(here)]
                found.append((names[id(here)], module))
    return Places.of(found, among=[module for _, module in (*ones, *others)])


def _named_modules(subject: Subject) -> list[tuple[str, Module]]:
    modules = () if subject.root is None else subject.root.named_modules()
    return [(subject.original(path), module) for path, module in modules]


def _watched(pairing: Pairing, restored: frozenset[int]) -> tuple[tuple[Watched, ...], tuple[Watched, ...]]:
    """Both sides of the pairing, under the original's names; what either program may mutate counts for both."""
    ones: list[Watched] = []
    others: list[Watched] = []
    for one, other in zip(pairing.before, pairing.after, strict=True):
        may_be_mutated = any(storage_key(slot.tensor) in restored for slot in (one, other))
        for slot, side in ((one, ones), (other, others)):
            side.append(Watched(one.name, one.label, slot, may_be_mutated, slot.tensor.grad_fn is not None))
    return tuple(ones), tuple(others)


def _compared(pair: _Pair, calls: Sequence[Call]) -> Comparison:
    """What differs in these calls, made one after the other."""
    calls, ones, notes = _accepted(pair, calls)
    found = _against(pair, calls, ones)
    return replace(found, notes=(*notes, *found.notes))


def _accepted(pair: _Pair, calls: Sequence[Call]) -> tuple[Sequence[Call], list[Observation], list[str]]:
    """The calls, what the original does in them, and notes; with the data of the first call where it refuses others."""
    ones = _run_before(pair, calls)
    raised = ones[-1].raised
    if not calls[-1].other_data or raised is None or any(one.raised for one in ones[:-1]):
        return calls, ones, []
    last = calls[-1]
    groups = last.inputs(frozenset(), pair.start.state).other
    everything = frozenset(number for group in groups for number in group)

    def keeping(changed: Sequence[tuple[int, ...]]) -> Call:
        return replace(last, kept=everything.difference(*changed))

    def accepts(changed: Sequence[tuple[int, ...]]) -> bool:
        return _run_before(pair, [*calls[:-1], keeping(changed)])[-1].raised is None

    if not accepts([]):  # It is the state that the first call left.
        return calls, ones, []
    same = refused(groups, accepts)
    calls = [*calls[:-1], keeping([group for group in groups if group not in same])]
    numbers = sorted(number for group in same for number in group)
    why = f"with other data the original raises {raised}"
    notes = [SAME_DATA.format(name, why) for name in last.arguments.names(numbers)]
    return calls, _run_before(pair, calls), notes


def _run_before(pair: _Pair, calls: Sequence[Call]) -> list[Observation]:
    return run([pair.before, pair.after], pair.before_state, calls, pair.start)


def _against(pair: _Pair, calls: Sequence[Call], ones: Sequence[Observation]) -> Comparison:
    others = run([pair.after, pair.before], pair.after_state, calls, pair.start)
    found: list[Difference] = []
    notes: list[str] = []
    for call, one, other in zip(calls, ones, others, strict=True):
        names = _output_nodes(pair.before, one)
        for difference in differences(one, other, pair.tolerance):
            where = names.get(difference.where, difference.where)
            found.append(replace(difference, where=where, when=call.name))
        notes += [*_exceptions(call, one), *uncompared(one, other)]
    raised = sum(one.raised is not None for one in ones)
    return Comparison(tuple(found), tuple(notes), len(calls), raised)


def _compared_on_other_sizes(pair: _Pair, call: Call) -> Comparison:
    """The first other sizes that the original accepts, compared."""
    refused = []
    for words, arguments in _other_sizes(pair, call.arguments):
        other = replace(call, name=_with(words), arguments=arguments)
        ones = _run_before(pair, [other])
        if ones[0].raised is None:
            return _against(pair, [other], ones)
        refused.append(f"{words} ({ones[0].raised})")
    notes = [f"the original accepts no other sizes: {'; '.join(refused)}"] if refused else []
    inputs = (*pair.before.placeholders, *pair.after.placeholders)
    if not refused and any(symbols_in(value_of(node)) for node in inputs):
        notes.append(
            "sizes are symbolic, but other sizes were not tried: no argument gives a symbol by itself, in order, or "
            "one is empty, or others would be far larger"
        )
    return Comparison((), tuple(notes))


def _other_sizes(pair: _Pair, arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    for subject in (pair.before, pair.after):
        found = False
        for sizes in resized(arguments, subject.placeholders):
            found = True
            yield sizes
        if found:
            return


def _output_nodes(subject: Subject, observation: Observation) -> dict[str, str]:
    """The path of each output with the name of its node, where the graph is known."""
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
