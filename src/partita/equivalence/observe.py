"""Runs the calls of a program and records all that is observable: results, mutations, gradients, modes, RNG state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module

from partita._torch.modes import Ambient, read_ambient
from partita._torch.pytrees import flatten
from partita._torch.tensors import inner_tensors, plain_tensors, version_of
from partita.analysis.tolerance import EXACT, Tolerance
from partita.equivalence.ambient import RandomState, random_state, restored_ambient
from partita.equivalence.inputs import Arguments, Inputs, input_name
from partita.equivalence.objects import Containers, Opened, Shape, opened
from partita.equivalence.records import TensorRecord, record_of, tensor_record
from partita.equivalence.settings import STACKS, Settings, read_settings
from partita.equivalence.state import (
    Alias,
    Layout,
    Memory,
    Places,
    Slot,
    Snapshot,
    aliases_of,
    detach_in_place,
    slots_of,
    storage_key,
)
from partita.errors import OptionError, PartitaError
from partita.program.program import Program, mutated_positions


@dataclass(frozen=True, slots=True)
class Call:
    """One call to make: with which arguments, under which grad mode, with or without a backward pass."""

    name: str
    arguments: Arguments
    grad: bool
    backward: bool = False
    other_data: bool = False
    #: The numbers of the leaves that have the same data even so.
    kept: frozenset[int] = frozenset()

    def inputs(self, mutated: frozenset[int], state: frozenset[int]) -> Inputs:
        """The inputs of the call, where it may mutate those with the numbers `mutated`."""
        return self.arguments.inputs(mutated=mutated, state=state, other_data=self.other_data, kept=self.kept)


Comparable: TypeAlias = Program | Module | Callable[..., object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A callable with its state; `mutated` holds storage keys, `mutated_inputs` numbers of placeholders.

    `mutated_inputs` is None where nothing is known, so that any input may be mutated.
    """

    call: Callable[..., object]
    root: Module | None
    slots: tuple[Slot, ...]
    mutated: frozenset[int]
    mutated_inputs: frozenset[int] | None
    tolerance: Tolerance = EXACT
    placeholders: tuple[Node, ...] = ()
    output_names: tuple[str, ...] = ()
    #: The name that a module has in the original.
    original: Callable[[str], str] = str
    #: The grad mode under which it must be called, if any.
    caller_grad: bool | None = None

    def mutated_leaves(self, arguments: Arguments) -> frozenset[int]:
        """The numbers of the arguments' leaves that may be mutated."""
        exact = arguments.matches(self.placeholders)
        if self.mutated_inputs is not None and (exact or not self.mutated_inputs):
            return self.mutated_inputs
        return frozenset(range(len(arguments.tree.leaves)))


def subject_of(source: Comparable) -> Subject:
    """The subject of `source`; a callable that is no program may mutate all of its state and inputs."""
    if isinstance(source, Program):
        return _of_program(source)
    if isinstance(source, GraphModule):
        # A graph whose effects are not known can still be run.
        with suppress(PartitaError):
            return _of_program(Program.of(source))
    if not callable(source):
        raise OptionError(f"a program, a module or a function can be compared, not {type(source).__name__}")
    root = source if isinstance(source, Module) else getattr(source, "__self__", None)
    root = root if isinstance(root, Module) else None
    slots = slots_of(root)
    return Subject(source, root, slots, _keys(slot.tensor for slot in slots), None)


def _of_program(program: Program) -> Subject:
    module = program.module()
    if program.export is not None:
        # Its own graph takes parameters and buffers as inputs; that of its module is called like the model.
        return replace(_of_program(Program.of(module)), tolerance=program.tolerance)
    nodes, effects = program.index.nodes, program.effects
    placeholders = tuple(node for node in nodes if node.op == "placeholder")
    mutated = [nodes[i] for i in effects.mutated_inputs if nodes[i].op == "get_attr"]
    attributes = (attrgetter(str(node.target)) for node in mutated)
    held = [attribute(program.graph_module) for attribute in attributes]
    return Subject(
        call=module,
        root=module,
        slots=tuple(replace(slot, name=program.state_keys.original(slot.name)) for slot in slots_of(module)),
        mutated=_keys((*(value for value in held if isinstance(value, Tensor)), *effects.mutated_state)),
        mutated_inputs=frozenset(program.once(mutated_positions)),
        tolerance=program.tolerance,
        placeholders=placeholders,
        output_names=tuple(leaf.name if isinstance(leaf, Node) else "" for leaf in flatten(nodes[-1].args[0]).leaves),
        original=program.state_keys.original,
        caller_grad=program.caller.grad,
    )


def _keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    plain = (held for tensor in tensors for held in plain_tensors(tensor))
    return frozenset(key for key in map(storage_key, plain) if key is not None)


@dataclass(frozen=True, slots=True)
class Watched:
    """A state tensor of the program that runs, its name in the original, and whether it may be mutated.

    A tensor that was `computed` belongs to an autograd graph of the caller and must not be detached.
    """

    name: str
    label: str
    slot: Slot
    may_be_mutated: bool
    computed: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The start of every run, and by storage key which memory is state and which of it is restored afterwards."""

    snapshot: Snapshot
    random: RandomState
    state: frozenset[int]
    restored: frozenset[int]
    places: Places


def run(
    subjects: Sequence[Subject], state: Sequence[Watched], calls: Sequence[Call], start: Start
) -> list[Observation]:
    """The observations of the first subject's calls; inputs that any of the subjects may mutate are copies."""
    start.random.restore()
    try:
        return [_observed(subjects, state, call, start) for call in calls]
    finally:
        start.snapshot.restore()
        start.random.restore()


def _observed(subjects: Sequence[Subject], state: Sequence[Watched], call: Call, start: Start) -> Observation:
    with restored_ambient(), torch.set_grad_enabled(call.grad):
        mutated = frozenset[int]().union(*(subject.mutated_leaves(call.arguments) for subject in subjects))
        inputs = call.inputs(mutated, start.state)
        parameters = [(place.name, place.slot.tensor) for place in state if place.slot.tensor.requires_grad]
        leaves = [*((repr(name), leaf) for name, leaf in parameters), *inputs.leaves]
        # What was not copied, since by the programs' effects nothing mutates it.
        uncopied = [(place.label, place.slot.tensor) for place in state if not place.may_be_mutated]
        uncopied += inputs.passed_on
        versions = [version_of(tensor) for _, tensor in uncopied]
        memory = Memory.of([*((place.label, place.slot.tensor) for place in state), *inputs.tensors])
        layouts = [Layout.of(tensor) for _, tensor in inputs.passed_on if storage_key(tensor) is not None]
        in_training = _training_flags(subjects[0])
        with _restored_grads(leaf for _, leaf in leaves):
            seen, made = _called(subjects[0], state, inputs, start)
            if call.backward and seen.raised is None:
                raised, gradients = _gradients_of(made, leaves)
                left, generated = seen.moments[-1], None if raised else random_state()
                moment = Moment(
                    "after backward", left.ambient, left.settings, read_ambient(), read_settings(), generated
                )
                seen = replace(seen, moments=(*seen.moments, moment), backward_raised=raised, gradients=gradients)
        pairs = zip(uncopied, versions, strict=True)
        moved, added = memory.left(), start.places.added()
        mutations = [label for (label, tensor), old in pairs if version_of(tensor) != old or label in moved]
        switched = Counter((type(module).__name__, not flag) for module, flag in in_training if module.training != flag)
        seen = replace(
            seen,
            state=_state_now(state, added, start),
            added=frozenset(added),
            moved=moved - seen.replaced,
            switched=frozenset(switched.items()),
            undeclared=tuple(mutations),
        )
        made.clear()  # These tensors keep the graph alive, and no view can be detached from a living graph.
        _detach_state(state, added)
        for layout in layouts:
            layout.restore()
        return seen


def _training_flags(subject: Subject) -> list[tuple[Module, bool]]:
    """The modules with whether they are in training; a wrapper without a flag of its own is skipped."""
    modules = () if subject.root is None else subject.root.modules()
    return [(module, module.training) for module in modules if "training" in vars(module)]


def _called(
    subject: Subject, state: Sequence[Watched], inputs: Inputs, start: Start
) -> tuple[Observation, list[Tensor]]:
    """The observation of the bare call, and the tensors that gradients can flow from."""
    raised, result, found, settings = None, None, read_ambient(), read_settings()
    given = dict(opened((inputs.args, inputs.kwargs)).leaves)
    try:
        result = subject.call(*inputs.args, **inputs.kwargs)
        moment = Moment("after the call", found, settings, read_ambient(), read_settings(), random_state())
    except Exception as error:
        raised = Raised(type(error), str(error))
        # The caller sees these modes when it catches the error; guards in the frames of its traceback may go with it.
        moment = Moment("after the call", found, settings, read_ambient(), read_settings(), None)
    # What is recorded from here on would go through them.
    settings.restore(STACKS)
    returned, passed = opened(result), opened((inputs.args, inputs.kwargs))
    outputs = () if raised else tuple(("output" + path, leaf) for path, leaf in returned.leaves)
    tensors = [(name, leaf) for name, leaf in outputs if isinstance(leaf, Tensor)]
    held = [(place.label, tensor) for place in state if (tensor := place.slot.current()) is not None]
    around = [*inputs.tensors, *held]
    replaced = {place.label: now for place in state if (now := place.slot.current()) is not place.slot.tensor}
    entered = {
        _after(path): leaf for path, leaf in passed.leaves if isinstance(leaf, Tensor) and given.get(path) is not leaf
    }
    added = start.places.added()
    others = [(name, now) for name, now in {**replaced, **entered, **added}.items() if now is not None]
    held_before = {_after(path) for path, leaf in given.items() if isinstance(leaf, Tensor)}
    seen = Observation(
        raised=raised,
        structure={} if raised else returned.structure,
        outputs=tuple((name, record_of(leaf, restored=start.restored)) for name, leaf in outputs),
        input_structure=passed.structure,
        inputs=_inputs_now(inputs, passed, start),
        aliases=aliases_of([*tensors, *others], around),
        moments=(moment,),
        replaced=frozenset(replaced) | (entered.keys() & held_before),
        notes=inputs.notes,
    )
    made = [tensor for _, tensor in tensors]
    made += [tensor for _, tensor in (*around, *added.items()) if tensor.grad_fn is not None]
    return seen, made


def _after(path: str) -> str:
    return f"{input_name(path)} after the call"


def _inputs_now(inputs: Inputs, passed: Opened, start: Start) -> Named:
    skipped = {id(tensor) for _, tensor in inputs.passed_on}
    return tuple(
        (input_name(path), record_of(leaf, restored=start.restored))
        for path, leaf in passed.leaves
        if id(leaf) not in skipped
    )


def _state_now(state: Sequence[Watched], added: Mapping[str, Tensor], start: Start) -> Named:
    """Records of all state that may have been mutated, and of tensors that replaced others."""
    found: list[tuple[str, object]] = []
    for place in state:
        tensor = place.slot.current()
        if place.may_be_mutated or tensor is not place.slot.tensor:
            found.append((place.label, record_of(tensor, restored=start.restored)))
    for label, new in added.items():
        # The next call may mutate it.
        own = frozenset((key,)) if (key := storage_key(new)) is not None else frozenset[int]()
        found.append((label, record_of(new, restored=own)))
    return tuple(found)


def _detach_state(state: Sequence[Watched], added: Mapping[str, Tensor]) -> None:
    """Lets the next call start an autograd graph of its own, since backward has freed this one."""
    for new in added.values():
        if new.grad_fn is not None:
            detach_in_place(new)
    for place in state:
        tensor = place.slot.current()
        if tensor is not None and tensor.grad_fn is not None and not place.computed:
            detach_in_place(tensor)


#: Leaves or records with their paths.
Named = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception without its traceback, which would keep the memory of the call alive."""

    type: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"{self.type.__name__}: {self.text.strip().partition(chr(10))[0][:200]}"


@dataclass(frozen=True, slots=True)
class Moment:
    """The modes and settings before and after a call or backward; the RNG state after it (None after an exception)."""

    name: str
    found: Ambient
    found_settings: Settings
    ambient: Ambient
    settings: Settings
    random: RandomState | None


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything observable of one call."""

    raised: Raised | None
    structure: Mapping[str, Containers | Shape]
    outputs: Named
    input_structure: Mapping[str, Containers | Shape]
    inputs: Named
    aliases: tuple[tuple[str, Alias | None], ...]
    moments: tuple[Moment, ...]
    backward_raised: Raised | None = None
    gradients: tuple[tuple[str, TensorRecord | None], ...] = ()
    state: Named = ()
    #: The state, and the tensors in containers of the inputs, in whose place there is another tensor, or none.
    replaced: frozenset[str] = frozenset()
    #: The state at places where a module had no tensor before the call.
    added: frozenset[str] = frozenset()
    #: The state and inputs that were given other memory, by `tensor.data = ...` or `tensor.set_(...)`.
    moved: frozenset[str] = frozenset()
    #: The classes of modules that the call switched to training or to evaluation, each with the new flag and a count.
    switched: frozenset[tuple[tuple[str, bool], int]] = frozenset()
    undeclared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextmanager
def _restored_grads(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Runs the block with empty `.grad` fields, and restores those of the leaves afterwards."""
    kept = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves if leaf.is_leaf}.values()]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


def _gradients_of(
    results: Sequence[Tensor], leaves: Sequence[tuple[str, Tensor]]
) -> tuple[Raised | None, tuple[tuple[str, TensorRecord | None], ...]]:
    """The gradients of a weighted sum of `results` with respect to the leaves, and what backward raised."""
    differentiable = [result for result in results if result.requires_grad]
    known = {id(leaf) for _, leaf in leaves}
    try:
        behind = _leaves_behind(differentiable)
    except RuntimeError as error:  # For some mutated views even `grad_fn` raises.
        return Raised(type(error), str(error)), ()
    reached = [leaf for leaf in behind if id(leaf) not in known]
    # Both programs reach the same tensors, in any order, so their names hold the identity.
    outside = ((f"a leaf of shape {tuple(leaf.shape)} outside the state, {id(leaf):#x}", leaf) for leaf in reached)
    everything = [*leaves, *outside]
    tensors = [leaf for _, leaf in everything]
    try:
        found = _autograd_grad(differentiable, tensors)
    except Exception as error:
        return Raised(type(error), str(error)), tuple((name, None) for name, _ in everything)
    records = (None if gradient is None else tensor_record(gradient) for gradient in found)
    return None, tuple((name, record) for (name, _), record in zip(everything, records, strict=True))


def _autograd_grad(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients; no `.grad` field is set and no accumulation hook runs, where that is possible."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    weights = [_weights(number, result) for number, result in enumerate(results)]
    if not results or not wanted:
        return [None] * len(leaves)
    found: Sequence[Tensor | None]
    try:
        # The graph is retained since the other program may share what lies behind the inputs.
        found = torch.autograd.grad(results, wanted, weights, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "donated buffers" in str(error):
            # A backward that torch.compile made for single use overwrites what it saved, so it retains no graph.
            found = torch.autograd.grad(results, wanted, weights, allow_unused=True)
        elif "incompatible with .grad()" in str(error):
            # Reentrant checkpoints only support `.backward()`.
            with _restored_grads(leaves):
                torch.autograd.backward(list(results), weights)
                found = [leaf.grad for leaf in wanted]
        else:
            raise
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
    return [by_leaf.get(id(leaf)) for leaf in leaves]


def _weights(number: int, result: Tensor) -> Tensor:
    """Random weights between 0.5 and 1.5, the same in every run."""
    if inner_tensors(result):
        # Each rank weighs its own shard, so that no collective is needed.
        wrapper = result.detach().clone()
        for inner in plain_tensors(wrapper):
            inner.copy_(_weights(number, inner))
        return wrapper
    generator = torch.Generator("cpu").manual_seed(number + 1)
    weights = torch.rand(result.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    return weights.to(device=result.device, dtype=result.dtype)


def _leaves_behind(results: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the autograd graphs of these results; a function's closure may hold some."""
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
