"""Runs: the calls of one program in a row, each observed, from the same start as any other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita._torch.ambient import read_ambient
from partita._torch.trees import flatten
from partita._torch.versions import version_of
from partita.equivalence.aliasing import homes_of
from partita.equivalence.ambient import read_settings, restored_ambient
from partita.equivalence.detaching import detach_in_place
from partita.equivalence.gradients import gradients_of, kept_gradient_fields
from partita.equivalence.inputs import Arguments, Inputs, input_name
from partita.equivalence.observation import Moment, Named, Observation, Raised, named_leaves, record_of
from partita.equivalence.randomness import RandomState, random_state
from partita.equivalence.snapshot import Snapshot
from partita.equivalence.state import Slot
from partita.equivalence.subject import Subject

__all__ = ["Call", "Start", "Watched", "run"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call to make: with which arguments, under which grad mode, with or without a backward pass."""

    name: str
    arguments: Arguments
    grad: bool
    backward: bool = False
    other_data: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """A place in the state of the program that runs, what the original calls it, and whether it may be written.

    A tensor that was `computed` belongs to a graph of the caller's, from which nothing may cut it off.
    """

    name: str
    label: str
    slot: Slot
    may_be_written: bool
    computed: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Where every run starts, and by storage key which memory is state and which of it is restored afterwards."""

    snapshot: Snapshot
    random: RandomState
    state: frozenset[int]
    restored: frozenset[int]


def run(
    subjects: Sequence[Subject], state: Sequence[Watched], calls: Sequence[Call], start: Start
) -> list[Observation]:
    """What each call of the first subject shows; inputs that any of the subjects may write are copies."""
    start.random.restore()
    try:
        return [_observed(subjects, state, call, start) for call in calls]
    finally:
        start.snapshot.restore()
        start.random.restore()


def _observed(subjects: Sequence[Subject], state: Sequence[Watched], call: Call, start: Start) -> Observation:
    with restored_ambient(), torch.set_grad_enabled(call.grad):
        written = frozenset[int]().union(*(subject.written_among(call.arguments) for subject in subjects))
        inputs = call.arguments.inputs(written=written, state=start.state, other_data=call.other_data)
        parameters = [(place.name, place.slot.tensor) for place in state if place.slot.tensor.requires_grad]
        leaves = [*((repr(name), leaf) for name, leaf in parameters), *inputs.leaves]
        unwritten = _unwritten(state, inputs)
        versions = [version_of(tensor) for _, tensor in unwritten]
        with kept_gradient_fields(leaf for _, leaf in leaves):
            seen, made = _called(subjects[0], state, inputs, start)
            if call.backward and seen.raised is None:
                raised, gradients = gradients_of(made, leaves)
                left = seen.moments[-1].ambient
                moment = Moment(
                    "after backward", left, read_ambient(), read_settings(), None if raised else random_state()
                )
                seen = replace(seen, moments=(*seen.moments, moment), backward_raised=raised, gradients=gradients)
        touched = [label for (label, tensor), old in zip(unwritten, versions, strict=True) if version_of(tensor) != old]
        seen = replace(seen, state=_state_now(state, start), undeclared=tuple(touched))
        made.clear()  # What hangs on a graph keeps it alive, and no view can be cut off a graph that lives.
        _cut_from_graph(state)
        return seen


def _unwritten(state: Sequence[Watched], inputs: Inputs) -> list[tuple[str, Tensor]]:
    """The tensors that were not copied because nothing writes them, as far as the programs' effects tell."""
    return [*((place.label, place.slot.tensor) for place in state if not place.may_be_written), *inputs.passed_on]


def _called(
    subject: Subject, state: Sequence[Watched], inputs: Inputs, start: Start
) -> tuple[Observation, list[Tensor]]:
    """The observation of the bare call, and the tensors that gradients can flow from."""
    raised, result, found = None, None, read_ambient()
    try:
        result = subject.call(*inputs.args, **inputs.kwargs)
        moment = Moment("after the call", found, read_ambient(), read_settings(), random_state())
    except Exception as error:
        raised = Raised(type(error), str(error))
        # Whoever catches the error sees these modes; a guard in the frames that it holds may go with it.
        moment = Moment("after the call", found, read_ambient(), read_settings(), None)
    outputs = () if raised else named_leaves(result, "output")
    tensors = [(name, leaf) for name, leaf in outputs if isinstance(leaf, Tensor)]
    held = [(place.label, tensor) for place in state if (tensor := place.slot.current()) is not None]
    around = [*inputs.tensors, *held]
    seen = Observation(
        raised=raised,
        structure=None if raised else flatten(result).structure,
        outputs=tuple((name, record_of(leaf, restored=start.restored)) for name, leaf in outputs),
        input_structure=flatten((inputs.args, inputs.kwargs)).structure,
        inputs=_inputs_now(inputs, start),
        homes=homes_of(tensors, around),
        moments=(moment,),
    )
    made = [tensor for _, tensor in tensors] + [tensor for _, tensor in around if tensor.grad_fn is not None]
    return seen, made


def _inputs_now(inputs: Inputs, start: Start) -> Named:
    skipped = {id(tensor) for _, tensor in inputs.passed_on}
    tree = flatten((inputs.args, inputs.kwargs))
    pairs = zip(tree.paths, tree.leaves, strict=True)
    return tuple(
        (input_name(path), record_of(leaf, restored=start.restored)) for path, leaf in pairs if id(leaf) not in skipped
    )


def _state_now(state: Sequence[Watched], start: Start) -> Named:
    """Copies of all state that may have been written, and of tensors that took the place of others."""
    found: list[tuple[str, object]] = []
    for place in state:
        tensor = place.slot.current()
        if place.may_be_written or tensor is not place.slot.tensor:
            found.append((place.label, record_of(tensor, restored=start.restored)))
    return tuple(found)


def _cut_from_graph(state: Sequence[Watched]) -> None:
    """Lets the next call start a graph of its own, since backward has freed this one."""
    for place in state:
        tensor = place.slot.current()
        if tensor is not None and tensor.grad_fn is not None and not place.computed:
            detach_in_place(tensor)
