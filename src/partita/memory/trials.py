"""Trials of one segment: its forward and backward on fake tensors predict what each way to run it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.export.graph_signature import CustomObjArgument
from torch.fx import GraphModule, Node

from partita._torch.fake_tensors import FakeCopies
from partita._torch.fx.graph_writer import map_nodes
from partita._torch.pytrees import map_leaves, tensors_in
from partita.analysis.nodes import attribute_of, value_of
from partita.errors import BudgetError, PartitaError
from partita.memory._torch.recorder import Allocation, Ran, Record, Recorder, enter, leave, on_one_thread
from partita.memory.rates import Rates
from partita.policies.by_module import calls_around
from partita.program._torch.saved_tensors import isolated_from_caller


@final
@dataclass(frozen=True, slots=True)
class Input:
    """One input of a segment, as it is inside the model."""

    node: Node
    #: Parameters, buffers, constants and arguments: allocated anyway, and counted elsewhere.
    is_resident: bool
    requires_grad: bool
    #: Whether nothing but this segment reads it from here on.
    is_dying: bool


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """The body of a segment with its inputs and outputs."""

    body: GraphModule
    inputs: tuple[Input, ...]
    #: For each output whether later segments, or the loss, give it a gradient.
    gets_gradient: tuple[bool, ...]
    #: For each output whether the caller keeps it during the backward.
    is_kept: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """What one way to run a segment allocates; bytes relative to what is allocated before its forward."""

    seconds: float
    held: int
    forward: int
    backward: int
    #: The operators with the bytes after each, forward and then backward.
    ran: tuple[Ran, ...]
    #: Where the backward begins in `ran`.
    backward_at: int
    #: All results that the forward allocates.
    made: tuple[Allocation, ...]
    #: What stays allocated after the forward, and what is allocated at the highest point of each half.
    held_allocations: tuple[Allocation, ...]
    forward_allocations: tuple[Allocation, ...]
    backward_allocations: tuple[Allocation, ...]
    #: Which outputs require gradients, and which inputs get one.
    requires_grad: tuple[bool, ...]
    gets_gradient: tuple[bool, ...]
    #: Which inputs and which outputs are saved for backward.
    saves_input: tuple[bool, ...]
    saves_output: tuple[bool, ...]
    #: For each input the storages that it is in and that no input before is in, if it is not resident.
    input_allocations: tuple[tuple[Allocation, ...], ...]
    #: For each output its storage, if it is one that counts.
    output_allocations: tuple[Allocation | None, ...]

    def if_saved(self, number: int) -> tuple[int, int, int]:
        """What more is held, and needed in forward and backward, if an earlier segment has saved this input."""
        found = [0, 0, 0]
        for one in self.input_allocations[number]:
            if one.died is None:
                continue
            found[0] += 0 if any(held is one for held in self.held_allocations) else one.bytes
            halves = ((0, self.backward_at, self.forward), (self.backward_at, len(self.ran), self.backward))
            for half, (start, stop, highest) in enumerate(halves, 1):
                freed = self.ran[max(start, one.died) : stop]
                most = max((ran.allocated for ran in freed), default=highest - one.bytes)
                found[half] += max(most + one.bytes - highest, 0)
        return found[0], found[1], found[2]


def trial_of(
    segment: Segment, module: GraphModule, rates: Rates, *, script: Sequence[Ran] = (), rounding: int = 1
) -> Trial:
    """Runs `module`, which computes what the body of `segment` does, forward and backward on fake tensors.

    Raises a `BudgetError` where that fails.
    """
    try:
        return _tried(segment, module, rates, script=script, rounding=rounding)
    except PartitaError:
        raise
    except Exception as error:  # An operator may reject fake tensors with any error.
        first = next((node.name for node in module.graph.nodes if node.op == "call_function"), "nothing")
        raise BudgetError(
            f"the part of the model that begins with {first!r} cannot be tried on fake tensors, so what it allocates "
            f"is not known: {type(error).__name__}: {str(error).partition(chr(10))[0]}. What torch.compile can trace, "
            'torch.compile(model, backend="partita", options={"peak": ...}) plans without trying it'
        ) from error


def _tried(segment: Segment, module: GraphModule, rates: Rates, *, script: Sequence[Ran], rounding: int) -> Trial:
    fakes = FakeCopies()
    recorder = Recorder(script=script, rounding=rounding)
    with isolated_from_caller(grad=True), fakes.mode, on_one_thread():
        root = fakes.module(module)
        recorder.ignore(fakes.owned[1::2])
        inputs = _Inputs(segment, fakes, recorder)
        before = recorder.record.allocated
        with recorder:
            outputs = _run(root, module, inputs.values, recorder)
            requires_grad = tuple(_requires_grad(value) for value in outputs)
            held = recorder.record.allocated - before
            forward_ends = len(recorder.record.ran)
            kept = [value for value, is_kept in zip(outputs, segment.is_kept, strict=True) if is_kept]
            given = [
                value
                for value, wanted in zip(outputs, segment.gets_gradient, strict=True)
                if wanted and _requires_grad(value)
            ]
            held_now = [one for one in recorder.record.allocations if one.died is None]
            recorder.start_again()
            last = leave(given) if given else None
            watched = [recorder.watch(value) for value in outputs]
            returned = tuple(recorder.storage_of(value) for value in outputs)
            outputs.clear()
            given.clear()
            saves_input = inputs.are_saved()
            saves_output = tuple(is_allocated() for is_allocated in watched)
            if last is not None:
                last.backward()
            gets_gradient = inputs.have_gradients()
            del kept
    return _summary(
        recorder.record,
        before,
        held,
        forward_ends,
        held_now,
        rates,
        _Flags(requires_grad, gets_gradient, saves_input, saves_output, tuple(inputs.allocations), returned),
    )


class _Flags(NamedTuple):
    """What is known of each input and output after a trial."""

    requires_grad: tuple[bool, ...]
    gets_gradient: tuple[bool, ...]
    saves_input: tuple[bool, ...]
    saves_output: tuple[bool, ...]
    input_allocations: tuple[tuple[Allocation, ...], ...]
    output_allocations: tuple[Allocation | None, ...]


class _Inputs:
    """The fake inputs of a segment; what dies in the segment is referenced by `values` alone."""

    def __init__(self, segment: Segment, fakes: FakeCopies, recorder: Recorder) -> None:
        self.values: list[Any] = []
        self._taken: list[list[Tensor]] = []
        self._leaves: list[Tensor | None] = []
        self._shared: list[Any] = []
        self._watched: list[Callable[[], bool]] = []
        self.allocations: list[tuple[Allocation, ...]] = []
        for one in segment.inputs:
            traced = value_of(one.node)
            copied = _without_history(fakes, traced)
            counted: tuple[Allocation, ...] = ()
            if one.is_resident:
                recorder.ignore(tensors_in(copied))
            else:
                counted = recorder.count(tensors_in(copied), one.node.name, "")
            self.allocations.append(counted)
            taken: list[Tensor] = []
            leaf: Tensor | None = None
            if one.requires_grad and isinstance(copied, Tensor):
                if one.is_resident:
                    leaf = copied = copied.requires_grad_()
                else:
                    leaf = copied.new_zeros(()).requires_grad_()
                    copied = enter(leaf, _Once(copied), taken)
            self._leaves.append(leaf)
            self._taken.append(taken)
            self.values.append(copied)
            self._watched.append(recorder.watch(copied))
            if not one.is_dying:
                self._shared.append(copied)
            del copied
        fakes.forget()

    def are_saved(self) -> tuple[bool, ...]:
        """Which of the inputs are allocated although nothing refers to them but what autograd saves."""
        shared, self._shared = self._shared, []
        kept = [value for value in shared if isinstance(value, Tensor) and value.is_leaf and value.requires_grad]
        del shared
        found = tuple(is_allocated() for is_allocated in self._watched)
        self._shared = list(kept)
        return found

    def have_gradients(self) -> tuple[bool, ...]:
        """Which of the inputs have got a gradient."""
        leaves = zip(self._leaves, self._taken, strict=True)
        return tuple(bool(taken) or (leaf is not None and leaf.grad is not None) for leaf, taken in leaves)


class _Once:
    """Returns a tensor once, and forgets it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensors = [tensor]

    def __call__(self) -> Tensor:
        return self._tensors.pop()


def _without_history(fakes: FakeCopies, traced: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if isinstance(leaf, CustomObjArgument) and leaf.class_fqn == "torch._C.Generator":
            return torch.Generator()  # What export keeps of a generator of the model is its name.
        return fakes.tensor(leaf).detach() if isinstance(leaf, Tensor) else fakes.value(leaf)

    return map_leaves(copied, traced)


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _run(root: nn.Module, module: GraphModule, values: list[Any], recorder: Recorder) -> list[Any]:
    """Runs a graph node by node, and frees every value after its last use, as generated code does."""
    env: dict[Node, Any] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = values.pop(0)
    dead_after = _dead_after(module)
    outputs: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "output":
            result = map_nodes(node.args[0], env.__getitem__)
            outputs = list(result) if isinstance(result, tuple | list) else [result]
            del result
            break
        if node.op != "placeholder":
            recorder.node, recorder.path = _name_of(node)
            env[node] = _result(node, env, root)
        for dead in dead_after.get(node, ()):
            del env[dead]
    recorder.node, recorder.path = "", ""
    return outputs


def _dead_after(module: GraphModule) -> dict[Node, list[Node]]:
    last: dict[Node, Node] = {}
    for node in module.graph.nodes:
        last.setdefault(node, node)
        for read in node.all_input_nodes:
            last[read] = node
    found: dict[Node, list[Node]] = {}
    for read, node in last.items():
        found.setdefault(node, []).append(read)
    return found


def _name_of(node: Node) -> tuple[str, str]:
    """The name of a node and the path of its module; no name for an operator that runs a body."""
    if node.op == "call_function" and any(read.op == "get_attr" for read in node.all_input_nodes):
        return "", ""
    return node.name, module_path(node)


def module_path(node: Node) -> str:
    """The path of the innermost module that a node was traced in; empty for the model itself."""
    calls = calls_around(node, nn.Module())
    return calls[-1].path if calls else ""


def _result(node: Node, env: dict[Node, Any], root: nn.Module) -> Any:
    if node.op == "get_attr":
        return attribute_of(root, node)
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = attribute_of(root, node) if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _summary(
    record: Record,
    before: int,
    held: int,
    forward_ends: int,
    held_now: Sequence[Allocation],
    rates: Rates,
    flags: _Flags,
) -> Trial:
    halves = (range(forward_ends), range(forward_ends, len(record.ran)))
    highest = [max(half, key=lambda at: record.ran[at].allocated, default=None) for half in halves]
    forward, backward = (0 if at is None else record.ran[at].allocated - before for at in highest)
    at_forward, at_backward = (() if at is None else tuple(record.alive_at(at)) for at in highest)
    return Trial(
        seconds=sum(rates.seconds(one.flops, one.moved_bytes, is_attention=one.is_attention) for one in record.ran),
        held=held,
        forward=max(forward, held),
        backward=max(backward, held if backward else 0),
        ran=tuple(_relative(record.ran, before)),
        backward_at=forward_ends,
        made=tuple(
            one for one in record.allocations if one.operator and one.born < forward_ends and not one.is_workspace
        ),
        held_allocations=tuple(held_now),
        forward_allocations=at_forward,
        backward_allocations=at_backward,
        requires_grad=flags.requires_grad,
        gets_gradient=flags.gets_gradient,
        saves_input=flags.saves_input,
        saves_output=flags.saves_output,
        input_allocations=flags.input_allocations,
        output_allocations=flags.output_allocations,
    )


def _relative(ran: Sequence[Ran], before: int) -> Iterator[Ran]:
    return (replace(one, allocated=one.allocated - before) for one in ran)
