"""What is compared (a program, module or function): how to call it, its state, and what a call may mutate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
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
    return _of_unknown(source, root if isinstance(root, Module) else None)


def _of_program(program: Program) -> Subject:
    module = program.module()
    if program.export is not None:
        # Its own graph takes parameters and buffers as inputs; that of its module is called like the model.
        return replace(_of_program(Program.of(module)), tolerance=program.tolerance)
    nodes, effects = program.index.nodes, program.effects
    placeholders = tuple(node for node in nodes if node.op == "placeholder")
    number = {node: place for place, node in enumerate(placeholders)}
    mutated = [nodes[i] for i in effects.mutated_inputs]
    attributes = (attrgetter(str(node.target)) for node in mutated if node.op == "get_attr")
    held = [attribute(program.graph_module) for attribute in attributes]
    return Subject(
        call=module,
        root=module,
        slots=tuple(replace(slot, name=program.state_keys.original(slot.name)) for slot in slots_of(module)),
        mutated=_keys((*(value for value in held if isinstance(value, Tensor)), *effects.mutated_state)),
        mutated_inputs=frozenset(number[node] for node in mutated if node in number),
        tolerance=program.tolerance,
        placeholders=placeholders,
        output_names=tuple(leaf.name if isinstance(leaf, Node) else "" for leaf in flatten(nodes[-1].args[0]).leaves),
        caller_grad=program.caller.grad,
    )


def _of_unknown(call: Callable[..., object], root: Module | None) -> Subject:
    slots = slots_of(root)
    return Subject(call, root, slots, _keys(slot.tensor for slot in slots), None)


def _keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    plain = (held for tensor in tensors for held in plain_tensors(tensor))
    return frozenset(key for key in map(storage_key, plain) if key is not None)
