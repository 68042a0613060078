"""Tensors saved for backward, by node: found by a dry run of the program, or of a single node, without memory."""

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
from torch.fx import Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import (
    Allowance,
    is_torchs,
    refusal_of_call,
)
from partita._torch.fake_tensors import FakeCopies
from partita._torch.fx.graph_writer import map_nodes
from partita._torch.modes import read_ambient, restore_after_error
from partita._torch.nn_modules import StandsForBody
from partita._torch.pytrees import tensors_in
from partita._torch.symbolic_shapes import hint_of, is_unbacked, symbols_in
from partita._torch.toggles import TOGGLES
from partita.analysis.modes import AMBIENT, Mode
from partita.analysis.nodes import VALUE_KEYS, attribute_of, known_sum, value_of
from partita.analysis.nodes import tensors_in as traced_tensors
from partita.program._torch.saved_tensors import (
    OperatorMonitor,
    flops_until_saved,
    intercept_saved_tensors,
    isolated_from_caller,
    returns_only_views,
)
from partita.program.dry_run_refusals import refusal_in_graphs
from partita.program.flops import without_memory
from partita.program.program import Program


class Origin(Enum):
    """Where a storage comes from."""

    #: A parameter, a buffer or a constant, which is alive anyway.
    STATE = "state"
    #: An input of the program.
    INPUT = "input"
    #: The result of a node.
    RESULT = "result"
    #: A temporary of a node that is not part of its result, like the mask of a dropout.
    INSIDE = "inside"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One storage with all its views; `node` is the node that introduced it, None for the state of a module."""

    #: None if the size depends on data.
    bytes: int | None
    origin: Origin
    node: Node | None = None


@final
@dataclass(frozen=True, slots=True)
class NodeRun:
    """The storages that one node saves, returns, allocates and mutates, and its FLOPs."""

    #: What autograd saves for it, and still holds at the end of the program; each once.
    saves: tuple[Memory, ...] = ()
    #: The storages of its result.
    returns: tuple[Memory, ...] = ()
    #: The results of the operators that it decomposes into; views and casts that autocast inserts do not count.
    computes: tuple[Memory, ...] = ()
    #: Of these, the result of the last operator if autocast may have inserted it, as a cast for the next one.
    casts: tuple[Memory, ...] = ()
    #: Existing storages that it mutates.
    mutates: tuple[Memory, ...] = ()
    flops: int = 0
    #: The FLOPs done when autograd saves the last tensor; None if it saves nothing.
    flops_until_saved: int | None = None


@final
@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a forward run of `program` saves for backward; nothing is known if there is a `reason`.

    Symbolic sizes count as they were in the trace. Tensors that are saved but freed again, since no output needs them,
    do not count. The body of an operator counts as part of the node that runs it.
    """

    program: Program
    nodes: Mapping[Node, NodeRun] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    reason: str | None = None
    #: The modes that the program was called under; gradients are on and autocast is off where they say nothing else.
    caller: Mode = AMBIENT
    #: The nodes that mutate each existing storage, in order.
    mutators: Mapping[Memory, Sequence[Node]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mutators: dict[Memory, list[Node]] = {}
        for node, run in self.nodes.items():
            for memory in run.mutates:
                mutators.setdefault(memory, []).append(node)
        object.__setattr__(self, "mutators", MappingProxyType(mutators))

    def of(self, node: Node) -> NodeRun:
        """What `node` does; empty for an unknown node."""
        return self.nodes.get(node, _NO_EFFECTS)

    def memory(self, nodes: Iterable[Node] | None = None) -> frozenset[Memory]:
        """What autograd saves for these nodes, or for all; state is excluded, since it is alive anyway."""
        found = (memory for node in (self.nodes if nodes is None else nodes) for memory in self.of(node).saves)
        return frozenset(memory for memory in found if memory.origin is not Origin.STATE)


def bytes_in(memory: Iterable[Memory]) -> int | None:
    """The bytes of several storages; None if one is unknown."""
    return known_sum(one.bytes for one in memory)


def parameters_of(program: Program) -> tuple[nn.Parameter, ...]:
    """The parameters of a program, each once: of its modules, of an exported program, and those that Dynamo lifts."""
    lifted: Iterable[Any] = map(value_of, program.graph.find_nodes(op="placeholder"))
    found = (*program.graph_module.parameters(), *(lifted if program.export is None else program.export.state.values()))
    return tuple({id(value): value for value in found if isinstance(value, nn.Parameter)}.values())


_NO_EFFECTS = NodeRun()


# The dry run of a program: on fake tensors with gradients enabled, node by node.


def saved_tensors_of(program: Program, under: Mode = AMBIENT) -> SavedTensors:
    """What a forward run of `program` saves for backward; one dry run, in time linear in its nodes.

    It runs under the modes that the program is known to be called under, and those of `under`. The program, the ambient
    modes and the RNG state are unchanged. If the run is impossible, the result has the reason: inputs without traced
    values, unknown code, an operator that fails on fake tensors.
    """
    frame = Mode() if program.frame is None else Mode(autocast=program.frame.autocast)
    caller = under.within(frame.within(program.caller))
    run = _DryRun(program, casts=bool(caller.autocast))
    try:
        reason = _refusal(program)
        if reason is not None:
            return SavedTensors(program, reason=reason, caller=caller)
        with _called_under(caller):
            nodes = run.found()
    except Exception as error:  # An operator may reject fake tensors with any error.
        lines = str(error).splitlines() or [""]
        where = "" if run.at is None else f"node {run.at.name!r}: "
        return SavedTensors(program, reason=f"{where}{type(error).__name__}: {lines[0]}", caller=caller)
    return SavedTensors(program, nodes, caller=caller)


def _refusal(program: Program) -> str | None:
    if program.joint is not None:
        return "this is a joint graph, which contains its backward"
    nodes, effects = program.index.nodes, program.effects
    for number in (*effects.barriers, *effects.fences):
        return f"node {nodes[number].name!r} runs unknown code, which may have side effects in a dry run"
    compiled = [path for path, module in program.graph_module.named_modules() if isinstance(module, StandsForBody)]
    if compiled:
        return f"what {compiled[0]!r} saves is decided by its compiler"
    known = _states(program)
    for node in program.graph.find_nodes(op="placeholder"):
        if node not in known and not any(key in node.meta for key in VALUE_KEYS):
            return f"input {node.name!r} has no traced value"
    return refusal_in_graphs(program.graph_module)


def _states(program: Program) -> dict[Node, Any]:
    """The inputs of an exported program that are parameters, buffers or constants."""
    if program.export is None:
        return {}
    held = {**program.export.constants, **program.export.state}
    inputs = zip(program.graph.find_nodes(op="placeholder"), program.export.signature.input_specs, strict=True)
    return {node: held.get(str(spec.target), value_of(node)) for node, spec in inputs if spec.kind in _STATE_KINDS}


_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@contextmanager
def _called_under(caller: Mode) -> Iterator[None]:
    """Inside, the modes are those of the caller; where it says nothing, gradients are enabled and autocast is off."""
    with ExitStack() as stack:
        stack.enter_context(isolated_from_caller(grad=caller.grad is not False and not caller.inference))
        for block in caller.autocast:
            stack.enter_context(
                torch.autocast(block.device, block.dtype, enabled=block.enabled, cache_enabled=block.cache)
            )
        yield


#: How many operators a dry run may execute, and how many more for each node.
_CALLS, _CALLS_BY_NODE = 40_000, 10


class _DryRun:
    """One dry run of a program; `at` is the node that runs. It may cast other values than the trace did."""

    def __init__(self, program: Program, *, casts: bool) -> None:
        self._program = program
        self._casts = casts
        self._fakes = FakeCopies()
        self._root = nn.Module()
        self._values: dict[Node, Any] = {}
        self._recorder = _Recorder()
        allowance = Allowance(_CALLS + _CALLS_BY_NODE * len(program.index.nodes))
        self._monitor = OperatorMonitor(self._recorder.computed, allowance)
        self.at: Node | None = None

    def found(self) -> Mapping[Node, NodeRun]:
        """Runs the whole program; what each node did."""
        self._root.__dict__.update(self._fakes.attributes(self._program.graph_module))
        self._recorder.own(self._fakes.owned)
        self._take_inputs()
        with intercept_saved_tensors(self._pack), self._fakes.mode, self._monitor:
            ambient = read_ambient()
            try:
                self._run_all()
                return self._recorder.closed()
            except BaseException as error:
                restore_after_error(ambient, error)
                raise
            finally:
                # An inference block ends when its handle is freed, and inner blocks must end first.
                while self._values:
                    self._values.popitem()

    def _run_all(self) -> None:
        dead_after = _last_uses(self._program)
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                self.at = node
                self._run(node)
            for read in dead_after.get(node, ()):
                del self._values[read]

    def _pack(self, tensor: Tensor) -> object:
        return self._recorder.packed(tensor, self._monitor.flops)

    def _take_inputs(self) -> None:
        states = _states(self._program)
        for node in self._program.graph.find_nodes(op="placeholder"):
            traced = states.get(node, value_of(node))
            value = self._values[node] = self._fakes.value(traced)
            # Dynamo lifts parameters to inputs.
            is_state = node in states or isinstance(traced, nn.Parameter)
            self._recorder.begin(node, (), 0)
            self._recorder.end(tensors_in(value), Origin.STATE if is_state else Origin.INPUT, 0)

    def _run(self, node: Node) -> None:
        args, kwargs = map_nodes((node.args, dict(node.kwargs)), self._values.__getitem__)
        module = attribute_of(self._root, node) if node.op in ("call_module", "get_attr") else None
        owned = module.buffers() if isinstance(module, nn.Module) else ()
        # Taking an item reads no other item, and a container may have as many readers as items.
        takes_item = node.target is operator.getitem and isinstance(args[0], tuple | list)
        read = () if takes_item else (*tensors_in((args, kwargs)), *owned)
        self._recorder.begin(node, read, self._monitor.flops)
        result = _result_of(node, module, args, kwargs)
        origin = Origin.STATE if node.op == "get_attr" else Origin.RESULT
        self._recorder.end(tensors_in(result), origin, self._monitor.flops)
        if not self._casts:
            _check_dtype(node, result)
        if node.users or node.op == "output":
            self._values[node] = result


def _result_of(node: Node, module: Any, args: Any, kwargs: Any) -> Any:
    """The result of a node; for the output node, its arguments."""
    if node.op == "output":
        return args
    if node.op == "get_attr":
        return module
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = module if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _last_uses(program: Program) -> dict[Node, list[Node]]:
    """The values that are dead after each node, as in generated code."""
    index, last = program.index, dict[int, int]()
    for source, target in index.edges():
        last[source] = target
    found: dict[Node, list[Node]] = {}
    for source, target in last.items():
        found.setdefault(index.nodes[target], []).append(index.nodes[source])
    return found


def _check_dtype(node: Node, result: Any) -> None:
    """Raises if the run diverges from the trace: autocast may have been enabled only there."""
    traced = value_of(node)
    if isinstance(traced, Tensor) and isinstance(result, Tensor) and traced.dtype != result.dtype:
        raise TypeError(
            f"it returns {result.dtype} here, but was traced as {traced.dtype}; if it was traced under autocast, say "
            "so: plan.saved_memory(under=torch.autocast(...))"
        )


# The record of a dry run: which storages exist, which node allocated them, and which autograd still holds at the end.


class _Recorder:
    """Records storages while a program runs, node by node.

    Storages are identified by address, so the recorder keeps them alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._records: dict[Node, _NodeRecord] = {}
        self._current = _NodeRecord()

    def own(self, tensors: Iterable[Tensor]) -> None:
        """Records tensors whose storages the program owns."""
        for tensor in tensors:
            self._storages.setdefault(*_storage_of(tensor, Origin.STATE, None))

    def begin(self, node: Node, read: Iterable[Tensor], flops: int) -> None:
        """Starts `node`, which reads these tensors."""
        versions = [(tensor, tensor._version) for tensor in read if not tensor.is_inference()]
        self._current = self._records[node] = _NodeRecord(node, flops, read=versions)

    def packed(self, tensor: Tensor, flops: int) -> object:
        """Records a tensor that autograd saves; returns a stand-in that lives as long as the saved tensor would."""
        packed = _PackedTensor()
        self._current.saved.append((self._number(tensor), weakref.ref(packed)))
        self._current.flops_until_saved = flops - self._current.flops_before
        return packed

    def computed(self, result: Any, *, is_cast: bool) -> None:
        """Records the result of an operator; a cast for the next operator of its node is recomputed with that."""
        numbers = list(map(self._number, tensors_in(result)))
        self._current.last_cast = numbers if is_cast else []
        self._current.computed += [] if is_cast else numbers

    def end(self, results: Sequence[Tensor], origin: Origin, flops: int) -> None:
        """Ends the node; what it allocated and did not return is a temporary."""
        current = self._current
        current.computed += current.last_cast
        current.returned = list(map(self._number, results))
        for number in current.returned:
            storage = self._storages[number]
            if storage.node is current.node and storage.origin is Origin.INSIDE:
                storage.origin = origin
        current.mutated = [self._number(tensor) for tensor, version in current.read if tensor._version != version]
        current.read = []
        current.flops = flops - current.flops_before

    def closed(self) -> Mapping[Node, NodeRun]:
        """What each node did; must be called while the results of the program are alive."""
        memory = {number: storage.memory() for number, storage in self._storages.items()}
        return MappingProxyType({node: record.as_run(memory) for node, record in self._records.items()})

    def _number(self, tensor: Tensor) -> int:
        number, storage = _storage_of(tensor, Origin.INSIDE, self._current.node)
        self._storages.setdefault(number, storage)
        return number


class _PackedTensor:
    """The stand-in for a saved tensor."""


@dataclass(slots=True)
class _Storage:
    """A storage, and what is known of it so far."""

    storage: Any
    origin: Origin
    node: Node | None

    def memory(self) -> Memory:
        # Read late, since an operator may have resized its `out`.
        size = self.storage.nbytes()
        return Memory(None if any(map(is_unbacked, symbols_in(size))) else int(hint_of(size)), self.origin, self.node)


def _storage_of(tensor: Tensor, origin: Origin, node: Node | None) -> tuple[int, _Storage]:
    storage = tensor.untyped_storage()
    return int(storage._cdata), _Storage(storage, origin, node)


@dataclass(slots=True)
class _NodeRecord:
    """What one node does; storages by number."""

    node: Node | None = None
    flops_before: int = 0
    read: list[tuple[Tensor, int]] = field(default_factory=list)
    saved: list[tuple[int, weakref.ref[_PackedTensor]]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    #: The result of the last operator, if that is a cast.
    last_cast: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    flops: int = 0
    flops_until_saved: int | None = None

    def as_run(self, memory: Mapping[int, Memory]) -> NodeRun:
        def once(numbers: Iterable[int]) -> tuple[Memory, ...]:
            return tuple(memory[number] for number in dict.fromkeys(numbers))

        return NodeRun(
            saves=once(number for number, packed in self.saved if packed() is not None),
            returns=once(self.returned),
            computes=once(self.computed),
            casts=once(self.last_cast),
            mutates=once(self.mutated),
            flops=self.flops,
            flops_until_saved=self.flops_until_saved,
        )


# Dry runs of single nodes: whether autograd saves a tensor for one, and how much has been computed by then.


#: Not zero, since a node that saves its result must have computed it.
_UNKNOWN = 1
#: How many operators dry runs may execute in all, how many more for each, and the most items of a container.
_TRIAL_CALLS, _MORE_CALLS, _MOST_ITEMS = 20_000, 20, 1_000


class NodeDryRuns:
    """What autograd saves for single nodes; equal operators on equal shapes are run once.

    All inputs that can require gradients are assumed to, so more may be saved here than in the program. A node that
    cannot be run is assumed to save its result. For a whole program, see `saved_tensors_of`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int | None] = {}
        self._allowance = Allowance(_TRIAL_CALLS)

    def flops_until_saved(self, node: Node) -> int | None:
        """The FLOPs done when the node saves its last tensor; None if it saves nothing."""
        if node.op == "get_attr" or node.target in TOGGLES or _saves_nothing(node):
            return None
        if not _can_be_run(node):
            return _UNKNOWN
        try:
            return self._dry_run(node)
        except Exception:  # A function may reject meta tensors with any error.
            return _UNKNOWN

    def _dry_run(self, node: Node) -> int | None:
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: without_memory(value_of(source)))
        args, kwargs = arguments
        if refusal_of_call(node.target, args, kwargs) is not None:
            return _UNKNOWN
        key = (node.op, node.target, repr(arguments))
        if key not in self._known:
            self._allowance.add(_MORE_CALLS)
            self._known[key] = _UNKNOWN  # Unless the dry run succeeds.
            self._known[key] = flops_until_saved(node.op, node.target, args, kwargs, allowance=self._allowance)
        return self._known[key]


def _saves_nothing(node: Node) -> bool:
    """Whether that is known without a dry run: it takes an item or a view, or reads no tensors."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None for value in read):
        return False
    if node.target is operator.getitem and read and isinstance(read[0], tuple | list):
        return True
    if returns_only_views(node.target):
        return all(tensor.layout is torch.strided for value in read for tensor in traced_tensors(value))
    is_known = node.op == "call_method" or (node.op == "call_function" and is_torchs(node.target))
    return is_known and not any(True for value in read for _ in traced_tensors(value))


def _can_be_run(node: Node) -> bool:
    """Whether it calls an operator, a function or a method of torch on traced values; no other code is run."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None or (isinstance(value, tuple | list) and len(value) > _MOST_ITEMS) for value in read):
        return False
    if node.op == "call_method":
        return isinstance(read[0], Tensor) and hasattr(Tensor, str(node.target))
    if node.op != "call_function" or not is_torchs(node.target):
        return False
    # Python's operators may repeat a container any number of times.
    values = (*read, *(argument for argument in node.args if not isinstance(argument, Node)))
    return not _is_pythons(node.target) or not any(isinstance(value, tuple | list) for value in values)


def _is_pythons(target: Any) -> bool:
    return target is not operator.getitem and getattr(target, "__module__", None) == operator.add.__module__
