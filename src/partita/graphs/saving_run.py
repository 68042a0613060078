"""A run that shows what autograd saves: on fake tensors with gradients on, once, node by node."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from partita._torch.ambient import read_ambient, restore_after_error
from partita._torch.dry_runs import Allowance, has_kernel_for_fakes, is_loop, is_of_level, refusal_of_call
from partita._torch.nodes import map_nodes
from partita._torch.saved_fakes import FakeCopies
from partita._torch.saved_operators import OperatorWatch
from partita._torch.saved_setting import apart_from_the_caller, saving_into
from partita._torch.stage import tensors_in
from partita._torch.standing_modules import StandsForBody
from partita._torch.symbolic import NUMBER_FUNCTIONS
from partita.graphs.attributes import attribute_of
from partita.graphs.program import Program
from partita.graphs.saved_tensors import NodeRun, Origin, SavedTensors
from partita.graphs.saving_notes import SavingNotes
from partita.graphs.values import VALUE_KEYS, value_of

__all__ = ["saved_tensors_of"]


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
