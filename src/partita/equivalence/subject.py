"""Subjects: what is compared, whatever it came as: how to call it, its state, and what a call may write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module

from partita._torch.pytrees import flatten
from partita._torch.tensors import plain_tensors
from partita.analysis.tolerance import EXACT, Tolerance
from partita.equivalence.inputs import Arguments
from partita.equivalence.state import Slot, slots_of, storage_key
from partita.errors import OptionError, PartitaError
from partita.program.program import Program

__all__ = ["Comparable", "Subject", "subject_of"]


Comparable: TypeAlias = Program | Module | Callable[..., object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A callable with its state; `written` holds storage keys, `written_inputs` numbers of placeholders.

    `written_inputs` is None where nothing is known, so that any input may be written.
    """

    call: Callable[..., object]
    root: Module | None
    slots: tuple[Slot, ...]
    written: frozenset[int]
    written_inputs: frozenset[int] | None
    tolerance: Tolerance = EXACT
    placeholders: tuple[Node, ...] = ()
    output_names: tuple[str, ...] = ()
    #: The grad mode that it is made to be called under, if any.
    caller_grad: bool | None = None

    def written_among(self, arguments: Arguments) -> frozenset[int]:
        """The numbers of the arguments' leaves that may be written."""
        exact = arguments.matches(self.placeholders)
        if self.written_inputs is not None and (exact or not self.written_inputs):
            return self.written_inputs
        return frozenset(range(len(arguments.tree.leaves)))


def subject_of(source: Comparable) -> Subject:
    """What `source` is; a callable that is no program may write all of its state and inputs."""
    if isinstance(source, Program):
        return _of_program(source)
    if isinstance(source, GraphModule):
        return _of_graph_module(source)
    if not callable(source):
        raise OptionError(f"a program, a module or a function can be compared, not {type(source).__name__}")
    root = source if isinstance(source, Module) else getattr(source, "__self__", None)
    return _of_unknown(source, root if isinstance(root, Module) else None)


def _of_graph_module(module: GraphModule) -> Subject:
    try:
        return _of_program(Program.of(module))
    except PartitaError:
        # A graph without an answer about its effects can still be run.
        return _of_unknown(module, module)


def _of_program(program: Program) -> Subject:
    module = program.module()
    if program.export is not None:
        # Its own graph takes parameters and buffers as inputs; that of its module is called like the model.
        return replace(_of_program(Program.of(module)), tolerance=program.tolerance)
    nodes, effects = program.index.nodes, program.effects
    placeholders = tuple(node for node in nodes if node.op == "placeholder")
    number = {node: place for place, node in enumerate(placeholders)}
    written = [nodes[i] for i in effects.written_inputs]
    held = [_held_by(program.graph_module, str(node.target)) for node in written if node.op == "get_attr"]
    return Subject(
        call=module,
        root=module,
        slots=tuple(replace(slot, name=program.state_keys.original(slot.name)) for slot in slots_of(module)),
        written=_keys((*(value for value in held if isinstance(value, Tensor)), *effects.written_state)),
        written_inputs=frozenset(number[node] for node in written if node in number),
        tolerance=program.tolerance,
        placeholders=placeholders,
        output_names=tuple(leaf.name if isinstance(leaf, Node) else "" for leaf in flatten(nodes[-1].args[0]).leaves),
        caller_grad=program.caller.grad,
    )


def _of_unknown(call: Callable[..., object], root: Module | None) -> Subject:
    slots = slots_of(root)
    return Subject(call, root, slots, _keys(slot.tensor for slot in slots), None)


def _held_by(root: Module, target: str) -> object:
    return attrgetter(target)(root)


def _keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    plain = (held for tensor in tensors for held in plain_tensors(tensor))
    return frozenset(key for key in map(storage_key, plain) if key is not None)
