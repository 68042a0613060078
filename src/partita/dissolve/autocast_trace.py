"""What autocast does to each node: found by running the node under autocast on fake tensors."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.dry_runs import Allowance, DryRunError, is_of_level
from partita._torch.fx.graph_writer import map_nodes
from partita._torch.pytrees import map_tensors, tensors_in
from partita.analysis.modes import Autocast, Block, Mode
from partita.analysis.nodes import VALUE_KEYS, value_of
from partita.dissolve._torch.operator_recorder import Label, OperatorRecorder, RecordedCall, Step, labels_in
from partita.dissolve._torch.sandbox import FakeSandbox, TensorMetadata
from partita.dissolve.grad import ReturnedArguments, records_gradients
from partita.dissolve.traced_values import call_with, can_carry_gradients, nodes_read, value_read
from partita.errors import ModeError
from partita.program.program import Program
from partita.rewrite.operator_calls import owned_inputs


class AutocastDryRun:
    """Runs nodes in graph order; `sandbox` must be open, and `close` must be called at the end."""

    def __init__(self, program: Program, sandbox: FakeSandbox) -> None:
        self._program, self._sandbox = program, sandbox
        self._leaves = Leaves(program, sandbox)
        self._recorder = OperatorRecorder(Allowance(_CALLS + _CALLS_BY_NODE * len(program.index.nodes)))
        self._looks: dict[Label, TensorMetadata] = {}
        #: Calls that autocast does not change, whatever it has cached.
        self._untouched: set[tuple[Any, ...]] = set()
        self._open: list[tuple[Block, torch.autocast]] = []
        self._around = tuple(Block(("caller", sets.device), sets, None) for sets in program.caller.autocast)

    def close(self) -> None:
        """Leaves the blocks that the last node was in."""
        self._enter(())

    def of(self, node: Node, mode: Mode) -> Outcome:
        """What autocast turns `node` into, which runs in `mode`."""
        self._enter((*self._around, *(block for block in mode.blocks if isinstance(block.sets, Autocast))))
        mode = mode.within(self._program.caller)
        active = [autocast for autocast in mode.autocast if autocast.enabled]
        values = [value_read(self._program, read) for read in nodes_read(node)]
        devices = {tensor.device.type for tensor in tensors_in(values) if tensor.is_floating_point()}
        if devices.isdisjoint(autocast.device for autocast in active) or is_of_level(node.target):
            return Unchanged()
        _check_devices(node, devices)
        key = (node.op, node.target, mode, _text_of(node, values))
        if key in self._untouched:
            return Unchanged()
        dtypes = tuple((autocast.device, autocast.dtype) for autocast in active)
        arguments = _Arguments(node, values, [self._leaves.of(read, dtypes) for read in nodes_read(node)])
        with _modes_of_a_run(mode):
            found = self._outcome(arguments, [autocast.device for autocast in active])
        if isinstance(found, Unchanged):
            self._untouched.add(key)
        return found

    def _outcome(self, arguments: _Arguments, devices: Sequence[str]) -> Outcome:
        seen, _ = self._run(arguments)
        if isinstance(seen.error, DryRunError):
            raise ModeError(
                f"what autocast does to node {arguments.node.name!r} cannot be determined: {seen.error}; switch "
                "autocast off around it"
            ) from seen.error
        self._looks.update((step.cast, step.metadata[0]) for step in seen.steps if step.cast is not None)
        if seen.error is None:
            check_value(arguments.node, [look.dtype for look in seen.metadata])
        with _without_autocast(devices):
            plain, places = self._run(arguments)
            if plain.text() == seen.text():
                return Unchanged()
            for casts, by_place in ways_to_cast(seen, places):
                if self._run(arguments, by_place)[0].text() == seen.text(first=len(casts)):
                    return CastArguments(casts, by_place, places)
        if seen.error is not None:
            raise ModeError(f"node {arguments.node.name!r} fails under autocast: {seen.error}") from seen.error
        return Decomposed(seen, places)

    def _run(self, arguments: _Arguments, by_place: Mapping[int, Label] | None = None) -> tuple[RecordedCall, Places]:
        """The operators that a node runs on new fakes, with casts at these places."""
        fakes, places = self._fakes(arguments)
        if by_place:
            fakes = self._with_casts(fakes, by_place)
        return self._recorder.of(call_with(arguments.node, fakes)), places

    def _fakes(self, arguments: _Arguments) -> tuple[list[Any], dict[Label, list[Place]]]:
        fakes: list[Any] = []
        places: dict[Label, list[Place]] = {}
        for number, (value, leaf) in enumerate(zip(arguments.values, arguments.leaves, strict=True)):
            fake = self._sandbox.copy(value) if leaf is None else leaf[1]
            fakes.append(fake)
            for item, tensor in enumerate(tensors_in(fake)):
                label = Label(f"{number}.{item}" if leaf is None else f"leaf {leaf[0]}", is_input=True)
                self._recorder.label(tensor, label)
                places.setdefault(label, []).append(Place(number, None if tensor is fake else item))
        return fakes, places

    def _with_casts(self, fakes: Sequence[Any], by_place: Mapping[int, Label]) -> list[Any]:
        """The fakes, with a cast at each of these places."""
        made: dict[Label, Tensor] = {}
        changed = list(fakes)
        for place, label in by_place.items():
            if label not in made:
                made[label] = self._sandbox.made(self._looks[label]).requires_grad_(fakes[place].requires_grad)
                self._recorder.label(made[label], label)
            changed[place] = made[label]
        return changed

    def _enter(self, blocks: Sequence[Block]) -> None:
        """Enters and exits autocast blocks until these are open, so that autocast caches casts as in a real run."""
        shared = 0
        while shared < min(len(blocks), len(self._open)) and blocks[shared] == self._open[shared][0]:
            shared += 1
        while len(self._open) > shared:
            self._open.pop()[1].__exit__(None, None, None)
        for block in blocks[shared:]:
            sets = block.sets
            assert isinstance(sets, Autocast)
            entered = torch.autocast(sets.device, sets.dtype, enabled=sets.enabled, cache_enabled=sets.cache)
            entered.__enter__()
            self._open.append((block, entered))


#: How many operators all dry runs may execute, and how many more for each node.
_CALLS, _CALLS_BY_NODE = 200_000, 200


class _Arguments(NamedTuple):
    """A node, and for each node that it reads the traced value and the leaf, if it is one."""

    node: Node
    values: list[Any]
    leaves: list[tuple[int, Tensor] | None]


def _text_of(node: Node, values: Sequence[Any]) -> str:
    """The arguments of a node, as far as autocast distinguishes them."""
    remaining = iter(values)
    looks = map_nodes((node.args, dict(node.kwargs)), lambda _: repr(map_tensors(TensorMetadata.of, next(remaining))))
    return repr(looks)


def _check_devices(node: Node, devices: Collection[str]) -> None:
    if "cuda" in devices and not torch.cuda.is_available():
        raise ModeError(
            f"node {node.name!r} runs under autocast on cuda, which torch disables on a machine without cuda, so "
            "its casts cannot be determined here; dissolve the program on a machine with cuda"
        )


def check_value(node: Node, dtypes: Sequence[torch.dtype]) -> None:
    """Raises where autocast returns other dtypes than the trace has: then the trace is of another program."""
    if not any(key in node.meta for key in VALUE_KEYS):
        return
    traced = [tensor.dtype for tensor in tensors_in(value_of(node))]
    if traced != list(dtypes):
        found, expected = ", ".join(map(str, dtypes)), ", ".join(map(str, traced))
        raise ModeError(
            f"node {node.name!r} returns {found} under its autocast, but was traced as {expected}. Autocast caches the "
            "cast of a weight for inner blocks with another dtype, which a trace does not show: use one dtype in a "
            "nest. Or torch traced the operator as if autocast were off, as it does with lstm: switch it off around "
            "this node"
        )


@contextmanager
def _modes_of_a_run(mode: Mode) -> Iterator[None]:
    """Gradients as in `mode`; inference mode as no_grad, but without the cast cache (seen in torch 2.13)."""
    keeps = torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(records_gradients(mode)):
        torch.set_autocast_cache_enabled(keeps and not mode.inference)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(keeps)


@contextmanager
def _without_autocast(devices: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Place(NamedTuple):
    """A position among the nodes that a node reads, and the item of that value, if it is a container."""

    number: int
    item: int | None


#: The places of each label among the arguments.
Places: TypeAlias = Mapping[Label, Sequence[Place]]


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Autocast changes nothing."""


@dataclass(frozen=True, slots=True)
class CastArguments:
    """The same node on casts of its arguments: each place reads the value with its label."""

    casts: tuple[Step, ...]
    by_place: Mapping[int, Label]
    places: Places


@dataclass(frozen=True, slots=True)
class Decomposed:
    """Other operators in place of the node."""

    recorded: RecordedCall
    places: Places


Outcome: TypeAlias = Unchanged | CastArguments | Decomposed


def ways_to_cast(seen: RecordedCall, places: Places) -> Iterator[tuple[tuple[Step, ...], dict[int, Label]]]:
    """Casts to make, and places to use them at, that may reproduce the recorded operators; the most likely first."""
    leading = tuple(takewhile(lambda step: step.cast is not None, seen.steps))
    cached = _cached_casts(seen)
    # The operator may begin with casts of its own.
    for count in range(len(leading), -1, -1):
        made = [step.cast for step in leading[:count] if step.cast is not None]
        for by_place in _by_place([*made, *cached], places):
            yield leading[:count], by_place


def _by_place(casts: Sequence[Label], places: Places) -> Iterator[dict[int, Label]]:
    of_source: dict[Label, list[Label]] = {}
    for label in casts:
        assert label.cast_of is not None
        of_source.setdefault(label.cast_of, []).append(label)
    for turned in (False, True) if any(len(casts) > 1 for casts in of_source.values()) else (False,):
        by_place: dict[int, Label] = {}
        for source, labels in of_source.items():
            numbers = [place.number for place in places.get(source, ()) if place.item is None]
            labels = labels * len(numbers) if len(labels) == 1 else labels
            if len(labels) != len(numbers) or not numbers:
                return
            # C++ evaluates arguments in any order it likes, and some compilers take the last one first.
            by_place.update(zip(numbers, reversed(labels) if turned else labels, strict=True))
        if by_place:
            yield by_place


def _cached_casts(seen: RecordedCall) -> list[Label]:
    """The casts that autocast has cached in earlier calls."""
    made = {label for step in seen.steps for label in labels_in(step.result)}
    read = labels_in([*((step.args, dict(step.kwargs)) for step in seen.steps), seen.result])
    return list(dict.fromkeys(label for label in read if label.cast_of is not None and label not in made))


class Leaves:
    """One fake tensor for each input, parameter and buffer of a program, the same wherever it is read.

    Autocast caches the cast of a leaf that requires gradients. Tensors that are never mutated are treated as such
    whether or not they require gradients: a cached cast of theirs has the same value.
    """

    def __init__(self, program: Program, sandbox: FakeSandbox) -> None:
        self._program, self._sandbox = program, sandbox
        self._mutated = {program.index.nodes[number] for number in program.effects.mutated_inputs}
        self._owned = owned_inputs(program)
        self._returned = ReturnedArguments(program, sandbox)
        self._found: dict[Any, tuple[int, Tensor]] = {}
        self._origins: dict[Node, Node | None] = {}

    def of(self, node: Node, dtypes: Hashable) -> tuple[int, Tensor] | None:
        """The leaf that `node` returns where autocast casts to `dtypes`, and its number; None if it returns no leaf.

        A tensor that requires no gradients is another leaf for other dtypes: it is cast to each of them, while one that
        does has but one cast in a nest of blocks.
        """
        origin = self._origin(node)
        return None if origin is None else self._leaf(origin, dtypes)

    def _origin(self, node: Node) -> Node | None:
        """The input or attribute that `node` returns: a mutation or an identity cast of a weight returns the weight."""
        passed: list[Node] = []
        source: Node | None = node
        while source is not None and source.op not in ("placeholder", "get_attr"):
            if source in self._origins:
                source = self._origins[source]
                break
            passed.append(source)
            source = self._returned.of(source).get(None)
        self._origins.update(dict.fromkeys(passed, source))
        return source

    def _leaf(self, node: Node, dtypes: Hashable) -> tuple[int, Tensor] | None:
        value = value_read(self._program, node)
        if not isinstance(value, Tensor) or not can_carry_gradients(value):
            return None
        owned = value if node.op == "get_attr" else self._owned.get(node)
        held = value if owned is None else owned
        # A tensor that was mutated where gradients are recorded is no leaf, and its traced value may be the final one.
        is_known = held.requires_grad and held.is_leaf
        key = (node if owned is None else id(owned), None if is_known else dtypes)
        if key not in self._found:
            fake = self._sandbox.copy(value, requires_grad=is_known or node not in self._mutated)
            self._found[key] = (len(self._found), fake)
        return self._found[key]
