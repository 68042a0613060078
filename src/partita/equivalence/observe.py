"""Runs, observations, gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita._torch.modes import Ambient, read_ambient
from partita._torch.pytrees import flatten
from partita._torch.tensors import inner_tensors, placements_of, plain_tensors, version_of
from partita.equivalence.ambient import RandomState, Settings, random_state, read_settings, restored_ambient
from partita.equivalence.inputs import Arguments, Inputs, input_name
from partita.equivalence.state import Home, Slot, Snapshot, detach_in_place, homes_of, storage_key
from partita.equivalence.subject import Subject

__all__ = ["Call", "Moment", "Named", "Observation", "Raised", "Start", "TensorRecord", "Watched", "run"]


# Runs: the calls of one program in a row, each observed, from the same start as any other run.


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


# Gradients: one backward pass from everything that a call made, leaving every `.grad` field as it was.


@contextmanager
def kept_gradient_fields(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Runs the block with empty `.grad` fields and gives the leaves their old ones back."""
    kept = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves if leaf.is_leaf}.values()]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[tuple[str, Tensor]]
) -> tuple[Raised | None, tuple[tuple[str, TensorRecord | None], ...]]:
    """The gradients that the leaves get from a weighted sum of `results`, and the exception that got in the way."""
    differentiable = [result for result in results if result.requires_grad]
    known = {id(leaf) for _, leaf in leaves}
    try:
        behind = _leaves_behind(differentiable)
    except RuntimeError as error:  # Some views that were written cannot even be asked for their graph.
        return Raised(type(error), str(error)), ()
    reached = [leaf for leaf in behind if id(leaf) not in known]
    # Both programs reach the very same tensors there, in any order, so identity is what pairs them.
    outside = ((f"a leaf of shape {tuple(leaf.shape)} outside the state, {id(leaf):#x}", leaf) for leaf in reached)
    everything = [*leaves, *outside]
    tensors = [leaf for _, leaf in everything]
    try:
        found = _gradients(differentiable, tensors)
    except Exception as error:
        return Raised(type(error), str(error)), tuple((name, None) for name, _ in everything)
    return None, tuple((name, _record(gradient)) for (name, _), gradient in zip(everything, found, strict=True))


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients, without a `.grad` field or a hook that waits for one being touched where that is possible."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    weights = [_weights(number, result) for number, result in enumerate(results)]
    if not results or not wanted:
        return [None] * len(leaves)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            results, wanted, weights, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if "incompatible with .grad()" not in str(error):
            raise
        # Reentrant checkpoints work with nothing but `.backward()`.
        with kept_gradient_fields(leaves):
            torch.autograd.backward(list(results), weights)
            found = tuple(leaf.grad for leaf in wanted)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
    return [by_leaf.get(id(leaf)) for leaf in leaves]


def _weights(number: int, result: Tensor) -> Tensor:
    """Weights between 0.5 and 1.5, the same in every run, none of which hides another's mistake."""
    if inner_tensors(result):
        # Every process weighs its own part, so that nobody waits for another.
        wrapper = result.detach().clone()
        for inner in plain_tensors(wrapper):
            inner.copy_(_weights(number, inner))
        return wrapper
    generator = torch.Generator().manual_seed(number + 1)
    weights = torch.rand(result.shape, generator=generator, dtype=torch.float32) + 0.5
    return weights.to(device=result.device, dtype=result.dtype)


def _leaves_behind(results: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the graphs of these results end in; a function's closure may hold some."""
    stack = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(stack)
    leaves: dict[int, Tensor] = {}
    while stack:
        step = stack.pop()
        variable = getattr(step, "variable", None)
        if isinstance(variable, Tensor):
            leaves.setdefault(id(variable), variable)
        for behind, _ in step.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                stack.append(behind)
    return list(leaves.values())


def _record(gradient: Tensor | None) -> TensorRecord | None:
    record = None if gradient is None else record_of(gradient)
    return record if isinstance(record, TensorRecord) else None


# Observations: all that can be seen of one call once it is over.


#: A leaf or record with the words that say where it was.
Named = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as it was: its properties, and its values apart from any graph."""

    type: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    inference: bool
    #: Whether values are told by a bit that conjugates or negates what lies in memory.
    conjugate: bool
    negative: bool
    value: Tensor
    #: How a DTensor is spread over devices.
    placements: tuple[object, ...] | None = None
    #: The tensors inside one that wraps others, which hold its values.
    inner: tuple[tuple[str, TensorRecord], ...] = ()


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception without its traceback, which would keep the memory of the call alive."""

    type: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"{self.type.__name__}: {self.text.strip().partition(chr(10))[0][:200]}"


@dataclass(frozen=True, slots=True)
class Moment:
    """The modes that something found, the modes, settings and random state that it left; None after an exception."""

    name: str
    found: Ambient
    ambient: Ambient
    settings: Settings
    random: RandomState | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What one call gave, wrote and left behind."""

    raised: Raised | None
    structure: object
    outputs: Named
    input_structure: object
    inputs: Named
    homes: tuple[tuple[str, Home | None], ...]
    moments: tuple[Moment, ...]
    backward_raised: Raised | None = None
    gradients: tuple[tuple[str, TensorRecord | None], ...] = ()
    state: Named = ()
    undeclared: tuple[str, ...] = ()


def record_of(leaf: object, *, restored: frozenset[int] = frozenset()) -> object:
    """What to keep of a leaf; values are copied only if they lie in memory that will be `restored`."""
    if isinstance(leaf, torch.Generator):
        leaf = leaf.get_state()
    if not isinstance(leaf, Tensor):
        return leaf
    value = _rows(leaf.detach()) if leaf.is_nested else leaf.detach()
    strided = leaf.layout is torch.strided and not leaf.is_nested
    held = {name: record_of(inner, restored=restored) for name, inner in inner_tensors(leaf).items()}
    return TensorRecord(
        type=type(leaf).__name__,
        dtype=leaf.dtype,
        shape=value.shape,
        stride=_telling_strides(leaf) if strided else None,
        device=leaf.device,
        layout=leaf.layout,
        requires_grad=leaf.requires_grad,
        inference=leaf.is_inference(),
        conjugate=strided and leaf.is_conj(),
        negative=strided and leaf.is_neg(),
        value=value.clone() if not held and storage_key(leaf) in restored else value,
        placements=placements_of(leaf),
        inner=tuple((name, record) for name, record in held.items() if isinstance(record, TensorRecord)),
    )


def named_leaves(value: object, root: str) -> tuple[tuple[str, object], ...]:
    """The leaves of `value` with their paths after `root`; dataclasses that torch does not know are opened too."""
    tree = flatten(value)
    found: list[tuple[str, object]] = []
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found += named_leaves(getattr(leaf, field.name), f"{root}{path}.{field.name}")
            found.append((f"the type of {root}{path}", type(leaf)))
        else:
            found.append((root + path, leaf))
    return tuple(found)


def _rows(nested: Tensor) -> Tensor:
    """The lengths and the values of a nested tensor's rows in one, since its own shape is a symbol."""
    rows = nested.unbind()
    lengths = torch.tensor([size for row in rows for size in row.shape], device=nested.device)
    return torch.cat([lengths.to(nested.dtype), *(row.flatten() for row in rows)])


def _telling_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, with 0 along axes of one element or none, where any stride means the same."""
    empty = tensor.numel() == 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if empty or size == 1 else stride for size, stride in pairs)
