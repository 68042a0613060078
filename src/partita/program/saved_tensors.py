"""What autograd saves of a program, by node."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import Allowance, has_kernel_for_fakes, is_loop, is_of_level, is_torchs, refusal_of_call
from partita._torch.fake_sandbox import FakeCopies, tensors_in
from partita._torch.fx.graph_writer import map_nodes
from partita._torch.modes import read_ambient, restore_after_error
from partita._torch.nn_modules import StandsForBody
from partita._torch.symbolic_shapes import NUMBER_FUNCTIONS, hint_of, is_unbacked, symbols_in
from partita._torch.toggles import TOGGLES
from partita.analysis.nodes import VALUE_KEYS, attribute_of, value_of
from partita.analysis.nodes import tensors_in as traced_tensors
from partita.program._torch.saved_tensors import (
    OperatorWatch,
    apart_from_the_caller,
    flops_until_saved,
    gives_only_views,
    saving_into,
)
from partita.program.flops import without_memory
from partita.program.program import Program

__all__ = ["Memory", "Origin", "SavedTensors", "SavingTrials", "bytes_in", "saved_tensors_of"]


# A run that shows what autograd saves: on fake tensors with gradients on, once, node by node.


def saved_tensors_of(program: Program) -> SavedTensors:
    """What a forward run of `program` saves for its backward; one run without memory, in time linear in its nodes.

    The program, the modes around and the random state stay as they are. Where the run is not possible, the reason is
    told instead: no traced inputs, code that nobody knows, an operator that fails on fake tensors.
    """
    reason = _refusal(program)
    if reason is not None:
        return SavedTensors(program, reason=reason)
    run = _Run(program)
    try:
        with _around(program):
            nodes = run.found()
    except Exception as error:  # Any operator may refuse fake tensors, in any way.
        lines = str(error).splitlines() or [""]
        where = "" if run.at is None else f"node {run.at.name!r}: "
        return SavedTensors(program, reason=f"{where}{type(error).__name__}: {lines[0]}")
    return SavedTensors(program, nodes)


def _refusal(program: Program) -> str | None:
    if program.joint is not None:
        return "this is a joint graph, whose backward is in sight"
    nodes, effects = program.index.nodes, program.effects
    for number in (*effects.barriers, *effects.fences):
        return f"node {nodes[number].name!r} runs code that nobody knows, and that would act if it were tried"
    compiled = [path for path, module in program.graph_module.named_modules() if isinstance(module, StandsForBody)]
    if compiled:
        return f"what {compiled[0]!r} saves is for its compiler to say"
    known = _states(program)
    for node in program.graph.find_nodes(op="placeholder"):
        if node not in known and not any(key in node.meta for key in VALUE_KEYS):
            return f"input {node.name!r} has no traced value"
    return _refusal_of_calls(program.graph_module)


def _refusal_of_calls(root: GraphModule) -> str | None:
    """Why a call in a graph, or in a body that it has, is not made on fake tensors either."""
    for module in root.modules():
        if not isinstance(module, GraphModule):
            continue
        bits: dict[Node, int] = {}
        for node in module.graph.nodes:
            if node.op == "call_function":
                why = _refusal_of_call(node, is_body=module is not root) or _refusal_of_number(node, bits)
                if why is not None:
                    return f"node {node.name!r} is not tried: {why}"
    return None


def _refusal_of_call(node: Node, *, is_body: bool) -> str | None:
    if is_of_level(node.target):
        return "it works in a level of torch.func"
    if not has_kernel_for_fakes(node.target):
        return "it is an operator of another library that has no fake kernel"
    if is_body and is_loop(node.target):
        return "it is a loop in a body"
    return refusal_of_call(node.target, node.args, node.kwargs)


#: The most bits of a number that a run may compute; those that it is given have up to 64.
_MOST_BITS = 100_000


def _refusal_of_number(node: Node, bits: dict[Node, int]) -> str | None:
    """Why a number is not computed: it may be longer than any size. Notes how long it may get."""
    if node.target not in NUMBER_FUNCTIONS or isinstance(value_of(node), Tensor):
        return None
    lengths = [_length(argument, bits) for argument in node.args]
    bits[node] = max(lengths, default=0) + 1
    if node.target in _GROWING:
        if any(isinstance(given, tuple | list) for given in _values(node.args)):
            return "it repeats a container"
        bits[node] = sum(lengths)
    if node.target in _GROWING_FAST:
        by = node.args[1] if len(node.args) > 1 else None
        # Of a power of two symbols, or of one that depends on data, nothing is known.
        times = abs(by) if isinstance(by, int | float) else _MOST_BITS
        bits[node] = int(min(lengths[0] * times if node.target in _POWERS else lengths[0] + times, 2 * _MOST_BITS))
    return f"its result may have {bits[node]} bits or more" if bits[node] > _MOST_BITS else None


def _length(argument: Any, bits: Mapping[Node, int]) -> int:
    if isinstance(argument, Node):
        return bits.get(argument, 64)
    return argument.bit_length() if isinstance(argument, int) else 64


def _values(arguments: Iterable[Any]) -> Iterator[Any]:
    return (value_of(given) if isinstance(given, Node) else given for given in arguments)


_POWERS = (operator.pow, operator.ipow)
_GROWING_FAST = (*_POWERS, operator.lshift, operator.ilshift)
_GROWING = (operator.mul, operator.imul)


def _states(program: Program) -> dict[Node, Any]:
    """The parameters, buffers and constants that an exported program has as inputs."""
    if program.export is None:
        return {}
    held = {**program.export.constants, **program.export.state}
    inputs = zip(program.graph.find_nodes(op="placeholder"), program.export.signature.input_specs, strict=True)
    return {node: held.get(str(spec.target), value_of(node)) for node, spec in inputs if spec.kind in _STATE_KINDS}


_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@contextmanager
def _around(program: Program) -> Iterator[None]:
    """The modes that the program is called under, as far as they are known; else gradients, and nothing else."""
    caller = program.caller
    with ExitStack() as stack:
        stack.enter_context(apart_from_the_caller(grad=caller.grad is not False and not caller.inference))
        for block in caller.autocast:
            stack.enter_context(
                torch.autocast(block.device, block.dtype, enabled=block.enabled, cache_enabled=block.cache)
            )
        yield


#: How many operators a run may come down to, and how many more for each node.
_CALLS, _CALLS_BY_NODE = 100_000, 100


class _Run:
    """The values of one run, and the notes about it; `at` is the node that runs."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fakes = FakeCopies()
        self._root = nn.Module()
        self._values: dict[Node, Any] = {}
        self._notes = SavingNotes()
        allowance = Allowance(_CALLS + _CALLS_BY_NODE * len(program.index.nodes))
        self._watch = OperatorWatch(self._notes.computed, allowance)
        self.at: Node | None = None

    def found(self) -> Mapping[Node, NodeRun]:
        """Runs the program to its end; what each node did."""
        self._root.__dict__.update(self._fakes.attributes(self._program.graph_module))
        self._notes.own(self._fakes.owned)
        self._take_inputs()
        with saving_into(self._pack), self._fakes.mode, self._watch:
            ambient = read_ambient()
            try:
                self._run_all()
                return self._notes.closed()
            except BaseException as error:
                restore_after_error(ambient, error)
                raise
            finally:
                # A block of inference mode ends with its handle, and the inner ones must go first.
                while self._values:
                    self._values.popitem()

    def _run_all(self) -> None:
        leaving = _last_uses(self._program)
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                self.at = node
                self._run(node)
            for read in leaving.get(node, ()):
                del self._values[read]

    def _pack(self, tensor: Tensor) -> object:
        return self._notes.packed(tensor, self._watch.flops)

    def _take_inputs(self) -> None:
        states = _states(self._program)
        for node in self._program.graph.find_nodes(op="placeholder"):
            traced = states.get(node, value_of(node))
            value = self._values[node] = self._fakes.value(traced)
            # Dynamo makes inputs of the parameters.
            is_state = node in states or isinstance(traced, nn.Parameter)
            self._notes.begin(node, (), 0)
            self._notes.end(tensors_in(value), Origin.STATE if is_state else Origin.INPUT, 0)

    def _run(self, node: Node) -> None:
        args, kwargs = map_nodes((node.args, dict(node.kwargs)), self._values.__getitem__)
        module = attribute_of(self._root, node) if node.op in ("call_module", "get_attr") else None
        owned = module.buffers() if isinstance(module, nn.Module) else ()
        # Who takes an item reads no other, and there may be as many that do.
        takes_item = node.target is operator.getitem and isinstance(args[0], tuple | list)
        read = () if takes_item else (*tensors_in((args, kwargs)), *owned)
        self._notes.begin(node, read, self._watch.flops)
        result = _called(node, module, args, kwargs)
        origin = Origin.STATE if node.op == "get_attr" else Origin.RESULT
        self._notes.end(tensors_in(result), origin, self._watch.flops)
        _check_dtype(node, result)
        if node.users or node.op == "output":
            self._values[node] = result


def _called(node: Node, module: Any, args: Any, kwargs: Any) -> Any:
    """What the node gives; an output gives nothing of its own."""
    if node.op == "output":
        return args
    if node.op == "get_attr":
        return module
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = module if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _last_uses(program: Program) -> dict[Node, list[Node]]:
    """The values that nobody reads any more after a node, as generated code lets go of them."""
    index, last = program.index, dict[int, int]()
    for source, target in index.edges():
        last[source] = target
    found: dict[Node, list[Node]] = {}
    for source, target in last.items():
        found.setdefault(index.nodes[target], []).append(index.nodes[source])
    return found


def _check_dtype(node: Node, result: Any) -> None:
    """Raises where the run went another way than the trace: autocast may be off here that was on there."""
    traced = value_of(node)
    if isinstance(traced, Tensor) and isinstance(result, Tensor) and traced.dtype != result.dtype:
        raise TypeError(f"it gives {result.dtype} here, but was traced as {traced.dtype}")


# Notes of a run: which storages there are, who made them, and which of them autograd holds in the end.


class SavingNotes:
    """Written while a program runs, node by node.

    Storages are told apart by their address, so they are kept alive until the notes are closed.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._about: dict[Node, _NodeNotes] = {}
        self._now = _NodeNotes()

    def own(self, tensors: Iterable[Tensor]) -> None:
        """The program owns the memory of these."""
        for tensor in tensors:
            self._seen.setdefault(*_seen(tensor, Origin.STATE, None))

    def begin(self, node: Node, read: Iterable[Tensor], flops: int) -> None:
        """What follows is about `node`, which reads these tensors."""
        versions = [(tensor, tensor._version) for tensor in read if not tensor.is_inference()]
        self._now = self._about[node] = _NodeNotes(node, flops, read=versions)

    def packed(self, tensor: Tensor, flops: int) -> object:
        """Autograd saves a tensor; what it gets in its place lives as long as it would have held the tensor."""
        held = _Held()
        self._now.saved.append((self._number(tensor), weakref.ref(held)))
        self._now.flops_until_saved = flops - self._now.flops_before
        return held

    def computed(self, result: Any) -> None:
        """An operator gave something."""
        self._now.computed += map(self._number, tensors_in(result))

    def end(self, given: Sequence[Tensor], origin: Origin, flops: int) -> None:
        """The node is through, and gave these; what it has made so far and is not among them stays inside."""
        now = self._now
        now.given = list(map(self._number, given))
        for number in now.given:
            seen = self._seen[number]
            if seen.node is now.node and seen.origin is Origin.INSIDE:
                seen.origin = origin
        now.written = [self._number(tensor) for tensor, version in now.read if tensor._version != version]
        now.read = []
        now.flops = flops - now.flops_before

    def closed(self) -> Mapping[Node, NodeRun]:
        """What was noted of each node; to be asked for while the results of the program are still there."""
        memory = {number: seen.memory() for number, seen in self._seen.items()}
        return MappingProxyType({node: notes.as_run(memory) for node, notes in self._about.items()})

    def _number(self, tensor: Tensor) -> int:
        number, seen = _seen(tensor, Origin.INSIDE, self._now.node)
        self._seen.setdefault(number, seen)
        return number


class _Held:
    """Stands for a saved tensor."""


@dataclass(slots=True)
class _Seen:
    """A storage, with what is known of it so far."""

    storage: Any
    origin: Origin
    node: Node | None

    def memory(self) -> Memory:
        # Only now: an operator may have made its `out` larger.
        size = self.storage.nbytes()
        return Memory(None if any(map(is_unbacked, symbols_in(size))) else int(hint_of(size)), self.origin, self.node)


def _seen(tensor: Tensor, origin: Origin, node: Node | None) -> tuple[int, _Seen]:
    storage = tensor.untyped_storage()
    return int(storage._cdata), _Seen(storage, origin, node)


@dataclass(slots=True)
class _NodeNotes:
    """What one node does; memory by number."""

    node: Node | None = None
    flops_before: int = 0
    read: list[tuple[Tensor, int]] = field(default_factory=list)
    saved: list[tuple[int, weakref.ref[_Held]]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    flops: int = 0
    flops_until_saved: int | None = None

    def as_run(self, memory: Mapping[int, Memory]) -> NodeRun:
        def once(numbers: Iterable[int]) -> tuple[Memory, ...]:
            return tuple(memory[number] for number in dict.fromkeys(numbers))

        return NodeRun(
            saves=once(number for number, held in self.saved if held() is not None),
            gives=once(self.given),
            computes=once(self.computed),
            writes=once(self.written),
            flops=self.flops,
            flops_until_saved=self.flops_until_saved,
        )


# Saved tensors: what autograd holds for the backward once a program has run, by node, from the traced values alone.


class Origin(Enum):
    """Where memory comes from."""

    #: A parameter, a buffer or a constant, which the program holds anyway.
    STATE = "state"
    #: An input of the program.
    INPUT = "input"
    #: The result of a node.
    RESULT = "result"
    #: Something that a node has made and shows to nobody, like the mask of a dropout.
    INSIDE = "inside"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One storage, whoever looks into it; `node` is what brought it into the program, None for what a module owns."""

    #: None where that is only known once the program runs.
    bytes: int | None
    origin: Origin
    node: Node | None = None


@final
@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one node does to memory."""

    #: What autograd saves for it, and still holds when the program is through; each once.
    saves: tuple[Memory, ...] = ()
    #: What its result lives in.
    gives: tuple[Memory, ...] = ()
    #: What the operators make that it comes down to; looking at memory is not making it.
    computes: tuple[Memory, ...] = ()
    #: What was there before, and is written.
    writes: tuple[Memory, ...] = ()
    flops: int = 0
    #: How many of the FLOPs are done when autograd saves something for the last time; None if it saves nothing.
    flops_until_saved: int | None = None


@final
@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a forward run of `program` with gradients saves; nothing is known where there is a `reason`.

    Symbolic sizes count as they were in the trace. What is saved and let go of again, since no output needs it, is not
    held. A body of an operator counts as part of the node that runs it.
    """

    program: Program
    nodes: Mapping[Node, NodeRun] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    reason: str | None = None
    #: The nodes that write to what was there before, by what they write, in order.
    writers: Mapping[Memory, Sequence[Node]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        writers: dict[Memory, list[Node]] = {}
        for node, run in self.nodes.items():
            for memory in run.writes:
                writers.setdefault(memory, []).append(node)
        object.__setattr__(self, "writers", MappingProxyType(writers))

    def of(self, node: Node) -> NodeRun:
        """What `node` does."""
        return self.nodes.get(node, _NOTHING)

    def held(self, nodes: Iterable[Node] | None = None) -> frozenset[Memory]:
        """What autograd holds for these nodes, or for all; state is left out, since it is held anyway."""
        found = (memory for node in (self.nodes if nodes is None else nodes) for memory in self.of(node).saves)
        return frozenset(memory for memory in found if memory.origin is not Origin.STATE)


def bytes_in(memory: Iterable[Memory]) -> int | None:
    """The bytes of several storages; None where some are not known."""
    sizes = [one.bytes for one in memory]
    return None if None in sizes else sum(size for size in sizes if size is not None)


_NOTHING = NodeRun()


# Trials of single nodes: whether autograd saves something for one, and how much has been computed by then.


#: More than nothing: whoever saves its result must have computed.
_UNKNOWN = 1
#: How many operators trials may come down to in all, how many more for each trial, and the most items of a container.
_TRIAL_CALLS, _MORE_CALLS, _MOST_ITEMS = 100_000, 1_000, 1_000


class SavingTrials:
    """What autograd saves for nodes, each tried apart; equal operators on equal shapes are tried once.

    All inputs that can have gradients are taken to have them, so that more may be saved here than in the program. What
    cannot be tried is taken to save its result. A program as a whole is looked at by `saved_tensors_of`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int | None] = {}
        self._allowance = Allowance(_TRIAL_CALLS)

    def flops_until_saved(self, node: Node) -> int | None:
        """How many of the node's FLOPs are done when it saves something for the last time; None if it saves nothing."""
        if node.op == "get_attr" or node.target in TOGGLES or _saves_nothing(node):
            return None
        if not _can_be_tried(node):
            return _UNKNOWN
        try:
            return self._tried(node)
        except Exception:  # A function may refuse tensors without memory in any way.
            return _UNKNOWN

    def _tried(self, node: Node) -> int | None:
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: without_memory(value_of(source)))
        args, kwargs = arguments
        if refusal_of_call(node.target, args, kwargs) is not None:
            return _UNKNOWN
        key = (node.op, node.target, repr(arguments))
        if key not in self._known:
            self._allowance.add(_MORE_CALLS)
            self._known[key] = _UNKNOWN  # Unless it can be tried.
            self._known[key] = flops_until_saved(node.op, node.target, args, kwargs, allowance=self._allowance)
        return self._known[key]


def _saves_nothing(node: Node) -> bool:
    """Whether that is known without a trial: it takes an item or a view, or reads no tensors."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None for value in read):
        return False
    if node.target is operator.getitem and read and isinstance(read[0], tuple | list):
        return True
    if gives_only_views(node.target):
        return all(tensor.layout is torch.strided for value in read for tensor in traced_tensors(value))
    is_known = node.op == "call_method" or (node.op == "call_function" and is_torchs(node.target))
    return is_known and not any(True for value in read for _ in traced_tensors(value))


def _can_be_tried(node: Node) -> bool:
    """Whether it is an operator, a function or a method of torch's, on traced values; nobody else's code is run."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None or (isinstance(value, tuple | list) and len(value) > _MOST_ITEMS) for value in read):
        return False
    if node.op == "call_method":
        return isinstance(read[0], Tensor) and hasattr(Tensor, str(node.target))
    if node.op != "call_function" or not is_torchs(node.target):
        return False
    # Python's operators repeat containers as often as they are told.
    given = (*read, *(argument for argument in node.args if not isinstance(argument, Node)))
    return not _is_pythons(node.target) or not any(isinstance(one, tuple | list) for one in given)


def _is_pythons(target: Any) -> bool:
    return target is not operator.getitem and getattr(target, "__module__", None) == operator.add.__module__
