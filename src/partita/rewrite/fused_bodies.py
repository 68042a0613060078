"""Fused bodies: chosen nodes as a module of their own, written down as torch's fuser writes it.

Values cross as they are, containers too, and attributes keep their dotted paths. What `outline` adds (symbols of
shapes, items of containers taken out at the border) is left out: whoever fuses by torch's rules counts on its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, final

from torch import nn
from torch.fx import Graph, Node

from partita._torch.lazy_modules import LazyModule, lazy_module
from partita._torch.nodes import GraphWriter
from partita.graphs.attributes import attribute_of, find
from partita.graphs.mode import AMBIENT, Mode
from partita.graphs.program import Program
from partita.graphs.values import VALUE_KEYS
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import is_persistent, place

__all__ = ["FusedBody", "FusedStyle", "fused_body", "is_idle", "mode_of_call", "names_module", "values_of_call"]


@dataclass(frozen=True, slots=True)
class FusedBody:
    """A module that computes `outputs` from `inputs`, which are nodes of the graph that its nodes come from."""

    module: LazyModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    #: Whether the one output is given as it is, and not in a tuple.
    is_bare: bool


@dataclass(frozen=True, slots=True)
class FusedStyle:
    """What the class of a body is called, the mode that it is called in, and how it returns a single value."""

    name: str
    mode: Mode = AMBIENT
    returns_tuple: bool = False
    #: A part is called by a module that shows the failing line of generated code itself.
    is_part: bool = False


def fused_body(
    program: Program, numbers: Sequence[int], style: FusedStyle, called: Mapping[Node, str] = MappingProxyType({})
) -> FusedBody:
    """The nodes with these `numbers`, in this order, as a module; `called` has other names for some of its inputs."""
    index, root = program.index, program.graph_module
    inside = frozenset(numbers)
    inputs, bodies = _read_from_outside(program, numbers, inside)
    outputs = tuple(_read_outside(program, numbers, inside))
    is_bare = len(outputs) == 1 and not style.returns_tuple
    writer = _BodyWriter(program, style.mode)
    writer.write(numbers, {node: called.get(node, node.name) for node in inputs}, [*bodies])
    graph = writer.close(outputs, is_bare=is_bare)
    module = lazy_module(
        graph,
        training=root.training,
        restores_modes=writer.modes.has_switched,
        is_impure=not inside.isdisjoint(program.effects.effectful),
        is_part=style.is_part,
    )
    type(module).__name__ = style.name
    held = [index.nodes[number] for number in numbers]
    _give_attributes(root, module, (*bodies, *(node for node in held if node.op in ("get_attr", "call_module"))))
    return FusedBody(module, tuple(inputs), outputs, is_bare)


def mode_of_call(program: Program, numbers: Iterable[int]) -> Mode | None:
    """The one mode that all of these nodes run under; None if there are several."""
    if program.modes.by_number is None:
        return AMBIENT
    found = [program.modes.at(number) for number in numbers if _has_mode(program, number)]
    first = found[0] if found else AMBIENT
    return first if all(_are_one(mode, first) for mode in found) else None


def names_module(node: Node, root: nn.Module) -> bool:
    """Whether `node` reads a module, the body of an operator say, which no call can be given."""
    return node.op == "get_attr" and isinstance(find(root, str(node.target)), nn.Module)


def is_idle(program: Program, number: int) -> bool:
    """Whether a node does nothing by itself: it switches a mode, or reads the body of an operator."""
    return number in program.modes.toggles or names_module(program.index.nodes[number], program.graph_module)


def values_of_call(outputs: Sequence[Node]) -> dict[str, Any]:
    """The traced value of a call that gives several: None for those of which nothing is known."""
    keys = [key for key in VALUE_KEYS if any(key in node.meta for node in outputs)]
    return {key: tuple(node.meta.get(key) for node in outputs) for key in keys}


def _read_from_outside(
    program: Program, numbers: Sequence[int], inside: frozenset[int]
) -> tuple[dict[Node, None], dict[Node, None]]:
    """What is read of the nodes outside, in order of first use: values, and modules."""
    index, root, toggles = program.index, program.graph_module, program.modes.toggles
    inputs: dict[Node, None] = {}
    bodies: dict[Node, None] = {}
    for number in numbers:
        for read in () if number in toggles else index.inputs(number):
            node = index.nodes[read]
            if read not in inside and read not in toggles and node not in inputs:
                (bodies if names_module(node, root) else inputs)[node] = None
    return inputs, bodies


def _read_outside(program: Program, numbers: Sequence[int], inside: frozenset[int]) -> Iterator[Node]:
    index, root, toggles = program.index, program.graph_module, program.modes.toggles
    is_open = index.nodes[-1].op != "output"
    for number in numbers:
        node = index.nodes[number]
        if number not in toggles and not names_module(node, root):
            readers = map(index.number.__getitem__, node.users)
            is_read = any(reader not in inside and reader not in toggles for reader in readers)
            # A graph without an output is not finished: what nobody reads is what it computes.
            is_result = is_open and not node.users and number not in program.effects.effectful
            if is_read or is_result:
                yield node


@final
class _BodyWriter:
    """A body while it is written: `env` gives the new value for each old node."""

    def __init__(self, program: Program, base: Mode) -> None:
        self.program = program
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer, base, caller=program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)

    def write(self, numbers: Sequence[int], inputs: Mapping[Node, str], bodies: Sequence[Node]) -> None:
        """Writes the inputs under these names, held placeholders beside them, reads of bodies, then the nodes."""
        nodes, toggles, writer = self.program.index.nodes, self.program.modes.toggles, self.writer
        held = [number for number in numbers if number not in toggles]
        writer.names.reserve((*inputs.values(), *(node.name for node in bodies), *(nodes[at].name for at in held)))
        owned = [nodes[number] for number in held if nodes[number].op == "placeholder"]
        held = [number for number in held if nodes[number].op != "placeholder"]
        # What has a default, or takes all that is left, comes last in a signature.
        late = [node for node in owned if node.args or str(node.target).startswith("*")]
        early = [node for node in owned if node not in late]
        writer.copy_run(early, self.env, [node.name for node in early])
        for node, name in inputs.items():
            # A value that another call gives has no type, as the call has none.
            annotation = node.type if name == node.name else None
            self.env[node] = writer.write("placeholder", name, name=name, type_expr=annotation)
            writer.copy_meta(node, self.env[node])
        writer.copy_run(late, self.env, [node.name for node in late])
        writer.copy_run(bodies, self.env, [node.name for node in bodies])
        for mode, run in _runs(self.program, held):
            if mode is not None:
                self.modes.switch(mode)
            chosen = [nodes[number] for number in run]
            writer.copy_run(chosen, self.env, [node.name for node in chosen])

    def close(self, outputs: Sequence[Node], *, is_bare: bool) -> Graph:
        """The graph, which returns `outputs` in the mode that it was called in."""
        self.modes.put_back()
        values = tuple(self.env[node] for node in outputs)
        name = self.writer.names.fresh("output")
        self.writer.write("output", "output", (values[0] if is_bare else values,), name=name)
        graph = self.writer.close()
        self.modes.close()
        return graph


def _runs(program: Program, numbers: Sequence[int]) -> Iterator[tuple[Mode | None, list[int]]]:
    """Runs of nodes with one mode; None where any mode will do."""
    by_number = program.modes.by_number
    if by_number is None:
        yield None, list(numbers)
        return
    # By identity: two blocks that set the same are two.
    for _, run in groupby(numbers, lambda number: id(by_number[number]) if _has_mode(program, number) else None):
        held = list(run)
        yield by_number[held[0]] if _has_mode(program, held[0]) else None, held


def _has_mode(program: Program, number: int) -> bool:
    """Reading an input or an attribute, or computing with numbers, means the same in every mode."""
    if number in program.modes.toggles or number in program.symbolic_scalars:
        return False
    return program.index.nodes[number].op not in ("placeholder", "get_attr")


def _are_one(mode: Mode, other: Mode) -> bool:
    return mode is other or (mode == other and mode.blocks == other.blocks)


def _give_attributes(root: nn.Module, module: nn.Module, nodes: Iterable[Node]) -> None:
    """Puts what the nodes name on `module`, at the same paths: whole modules before what is inside them."""
    named: Mapping[str, Any] = {str(node.target): attribute_of(root, node) for node in nodes}
    for path, value in sorted(named.items(), key=lambda entry: entry[0].count(".")):
        if value is None or find(module, path) is not value:
            place(module, path, value, persistent=_is_saved(root, path))


def _is_saved(root: nn.Module, path: str) -> bool:
    """Whether `path` is a buffer that is saved with `root`; a tensor that is a plain attribute is not."""
    folder, _, name = path.rpartition(".")
    holder = find(root, folder) if folder else root
    return isinstance(holder, nn.Module) and name in holder._buffers and is_persistent(root, path)
