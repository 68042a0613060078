"""Fusing in place: groups of nodes become submodules of the module that holds them, as torch's fuser does it.

Values cross as they are, containers too, and attributes keep their dotted paths. Unlike `outline`, nothing is added to
the inputs (symbols of shapes, items of containers): callers of torch's fuser rely on them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, final

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter, Names
from partita._torch.fx.lazy_graph_module import LazyModule, lazy_module
from partita.analysis.modes import AMBIENT, Mode
from partita.analysis.nodes import VALUE_KEYS, attribute_of, find
from partita.program.program import Program
from partita.rewrite.mode_nodes import ModeWriter
from partita.rewrite.state import is_persistent, place
from partita.solvers.quotient import ALONE, fused_order


@dataclass(frozen=True, slots=True)
class FusedBody:
    """A module that computes `outputs` from `inputs`, which are nodes of the graph that its nodes come from."""

    module: LazyModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    #: Whether a single output is returned without a tuple.
    is_bare: bool


@dataclass(frozen=True, slots=True)
class FusedStyle:
    """The class name of a body, the mode that it is called in, and how it returns a single value."""

    name: str
    mode: Mode = AMBIENT
    returns_tuple: bool = False
    #: A part is called by a module that shows the failing line of generated code itself.
    is_part: bool = False


def fuse(
    program: Program, groups: Sequence[Sequence[int]], names: Sequence[str], *, returns_tuple: bool = False
) -> None:
    """Makes each group of nodes, by number in an order in which they can run, a submodule of this name.

    The groups are disjoint, have nontrivial nodes, and can run one after another. The module is changed in one step,
    after all graphs are written.
    """
    calls = _calls(program, groups, names, returns_tuple=returns_tuple)
    outer = _OuterGraph(program, calls)
    graph = outer.write()
    _call_hooks(program, outer)
    _commit(program.graph_module, graph, calls)


def fused_body(
    program: Program, numbers: Sequence[int], style: FusedStyle, called: Mapping[Node, str] = MappingProxyType({})
) -> FusedBody:
    """The nodes with these `numbers`, in this order, as a module; `called` has other names for some of its inputs."""
    index, root = program.index, program.graph_module
    inside = frozenset(numbers)
    inputs, bodies = _inputs(program, numbers, inside)
    outputs = tuple(_outputs(program, numbers, inside))
    is_bare = len(outputs) == 1 and not style.returns_tuple
    writer = _FusedBodyWriter(program, style.mode)
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
    _share_attributes(root, module, (*bodies, *(node for node in held if node.op in ("get_attr", "call_module"))))
    return FusedBody(module, tuple(inputs), outputs, is_bare)


def mode_of_call(program: Program, numbers: Iterable[int]) -> Mode | None:
    """The one mode that all of these nodes run under; None if there are several."""
    if program.modes.by_number is None:
        return AMBIENT
    found = [program.modes.at(number) for number in numbers if _has_mode(program, number)]
    first = found[0] if found else AMBIENT
    is_one = all(mode is first or (mode == first and mode.blocks == first.blocks) for mode in found)
    return first if is_one else None


def names_module(node: Node, root: nn.Module) -> bool:
    """Whether `node` reads a module, the body of an operator say, which cannot be an argument of a call."""
    return node.op == "get_attr" and isinstance(find(root, str(node.target)), nn.Module)


def is_trivial(program: Program, number: int) -> bool:
    """Whether a node computes nothing: it switches a mode, or reads the body of an operator."""
    return number in program.modes.toggles or names_module(program.index.nodes[number], program.graph_module)


def values_of_call(outputs: Sequence[Node]) -> dict[str, Any]:
    """The traced value of a call with several results, None for those that were not traced."""
    keys = [key for key in VALUE_KEYS if any(key in node.meta for node in outputs)]
    return {key: tuple(node.meta.get(key) for node in outputs) for key in keys}


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a body, in this mode, in the place of the last of these nodes; the names of it and its items."""

    name: str
    body: FusedBody
    mode: Mode
    numbers: Sequence[int]
    node_name: str
    item_names: Sequence[str]


def _calls(
    program: Program, groups: Sequence[Sequence[int]], names: Sequence[str], *, returns_tuple: bool
) -> list[_Call]:
    """The calls, written one after another: an input that is a result of an earlier call has the name of that."""
    calls = []
    node_names, results = Names.continuing(program.graph), dict[Node, str]()
    for numbers, name in zip(groups, names, strict=True):
        mode = mode_of_call(program, numbers) or AMBIENT
        style = FusedStyle(name, mode, returns_tuple=returns_tuple, is_part=True)
        body = fused_body(program, numbers, style, results)
        node_name = node_names.fresh_for(name)
        items = () if body.is_bare else [node_names.fresh_for(operator.getitem) for _ in body.outputs]
        results.update(zip(body.outputs, [node_name] if body.is_bare else items, strict=True))
        calls.append(_Call(name, body, mode, numbers, node_name, items))
    return calls


@final
class _OuterGraph:
    """The graph with the calls while it is written: `env` maps old nodes to new ones."""

    def __init__(self, program: Program, calls: Sequence[_Call]) -> None:
        self.program, self.calls = program, calls
        self.nodes = program.index.nodes
        # Modes are rewritten, and a body of an operator is read wherever that runs: neither belongs to a group.
        held = [[at for at in call.numbers if not is_trivial(program, at)] for call in calls]
        self.owner = [ALONE] * len(self.nodes)
        for group, numbers in enumerate(held):
            for number in numbers:
                self.owner[number] = group
        self.lasts = [numbers[-1] for numbers in held]
        self.writer = GraphWriter.like(program.graph)
        self.modes = ModeWriter(self.writer, caller=program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        #: The call of each group.
        self.called: dict[int, Node] = {}
        #: The position of each node among the outputs of its body.
        self.position = {node: at for call in calls for at, node in enumerate(call.body.outputs)}

    def write(self) -> Graph:
        items = self._items()
        source = {item: number for number, item in items.items()}
        for step in self._order(items):
            if step in source:
                self._write_item(source[step])
            elif self.owner[step] == ALONE:
                self._write_node(self.nodes[step], step)
            else:
                self._write_call(self.owner[step])
        if self.nodes[-1].op != "output":
            self.modes.end_in(self.program.modes.final)
        graph = self.writer.close()
        self.modes.close()
        # The code generator carries the calling convention.
        graph.set_codegen(copy.copy(self.program.graph._codegen))
        return graph

    def _items(self) -> dict[int, int]:
        """A step of its own for every node that a body returns as one of several; counted after the nodes."""
        outputs = (node for call in self.calls if not call.body.is_bare for node in call.body.outputs)
        return {self.program.index.number[node]: len(self.nodes) + at for at, node in enumerate(outputs)}

    def _order(self, items: Mapping[int, int]) -> list[int]:
        program = self.program
        dropped = {number for number in range(len(self.nodes)) if self._is_dropped(number)}
        data, effects = program.index.edges(), program.effects.edges()
        return fused_order(self.owner, self.lasts, items, data=data, effects=effects, dropped=dropped)

    def _is_dropped(self, number: int) -> bool:
        """Whether a node is a toggle, which is rewritten, or a read of a body whose operators have all moved."""
        node, program = self.nodes[number], self.program
        if number in program.modes.toggles:
            return True
        if not node.users or not names_module(node, program.graph_module):
            return False
        return all(self.owner[program.index.number[user]] != ALONE for user in node.users)

    def _write_node(self, node: Node, number: int) -> None:
        if node.op == "output":
            self.modes.end_in(self.program.modes.final)
        elif node.op not in ("placeholder", "get_attr") and number not in self.program.symbolic_scalars:
            self.modes.switch(self.program.modes.at(number))
        self.env[node] = self.writer.copy(node, self.env.__getitem__, name=self.writer.names.fresh(node.name))

    def _write_call(self, group: int) -> None:
        call = self.calls[group]
        self.modes.switch(call.mode)
        inputs = tuple(self.env[node] for node in call.body.inputs)
        node = self.writer.write("call_module", call.name, inputs, name=self.writer.names.fresh(call.node_name))
        self.called[group] = node
        if call.body.is_bare:
            (result,) = call.body.outputs
            self.writer.copy_meta(result, node)
            self.env[result] = node
        else:
            node.meta.update(values_of_call(call.body.outputs))

    def _write_item(self, number: int) -> None:
        old, group = self.nodes[number], self.owner[number]
        position = self.position[old]
        name = self.writer.names.fresh(self.calls[group].item_names[position])
        node = self.writer.write("call_function", operator.getitem, (self.called[group], position), name=name)
        self.writer.copy_meta(old, node)
        self.env[old] = node


def _call_hooks(program: Program, outer: _OuterGraph) -> None:
    """Calls the node hooks of the module, by which export signatures follow created, replaced and erased nodes."""
    root, number, owner = program.graph_module, program.index.number, outer.owner
    for group, call in enumerate(outer.calls):
        outputs = call.body.outputs
        for created in root._create_node_hooks:
            for node in (outer.called[group], *(outer.env[old] for old in outputs if not call.body.is_bare)):
                created(node)
        for replaced in root._replace_hooks:
            for old in outputs:
                for user in old.users:
                    if owner[number[user]] != group:
                        replaced(old=old, new=outer.env[old].name, user=user)  # type: ignore[call-arg]
        for erased in root._erase_node_hooks:
            for at in reversed(call.numbers):
                erased(program.index.nodes[at])


def _commit(root: GraphModule, graph: Graph, calls: Sequence[_Call]) -> None:
    """Sets the new graph and its bodies on `root`; leaves `root` unchanged if no code can be generated."""
    before, children = root.graph, dict(root._modules)
    try:
        for call in calls:
            place(root, call.name, call.body.module)
        root.graph = graph
    except BaseException:
        for call in calls:
            folder, _, name = call.name.rpartition(".")
            root.get_submodule(folder)._modules.pop(name, None)
        root._modules.clear()
        root._modules.update(children)
        root.graph = before
        raise


def _inputs(
    program: Program, numbers: Sequence[int], inside: frozenset[int]
) -> tuple[dict[Node, None], dict[Node, None]]:
    """The nodes outside that are read, in order of first use: values, and modules."""
    index, root, toggles = program.index, program.graph_module, program.modes.toggles
    inputs: dict[Node, None] = {}
    bodies: dict[Node, None] = {}
    for number in numbers:
        for read in () if number in toggles else index.inputs(number):
            node = index.nodes[read]
            if read not in inside and read not in toggles and node not in inputs:
                (bodies if names_module(node, root) else inputs)[node] = None
    return inputs, bodies


def _outputs(program: Program, numbers: Sequence[int], inside: frozenset[int]) -> Iterator[Node]:
    index, root, toggles = program.index, program.graph_module, program.modes.toggles
    is_unfinished = index.nodes[-1].op != "output"
    for number in numbers:
        node = index.nodes[number]
        if number not in toggles and not names_module(node, root):
            readers = map(index.number.__getitem__, node.users)
            is_read = any(reader not in inside and reader not in toggles for reader in readers)
            # A graph without an output is unfinished: its unused values are its results.
            is_result = is_unfinished and not node.users and number not in program.effects.effectful
            if is_read or is_result:
                yield node


@final
class _FusedBodyWriter:
    """A body while it is written: `env` maps old nodes to new values."""

    def __init__(self, program: Program, base: Mode) -> None:
        self.program = program
        self.writer = GraphWriter.like(program.graph)
        self.modes = ModeWriter(self.writer, base, caller=program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)

    def write(self, numbers: Sequence[int], inputs: Mapping[Node, str], bodies: Sequence[Node]) -> None:
        """Writes the inputs under these names and the placeholders among the nodes, reads of bodies, then the nodes."""
        nodes, toggles, writer = self.program.index.nodes, self.program.modes.toggles, self.writer
        held = [number for number in numbers if number not in toggles]
        writer.names.reserve((*inputs.values(), *(node.name for node in bodies), *(nodes[at].name for at in held)))
        owned = [nodes[number] for number in held if nodes[number].op == "placeholder"]
        held = [number for number in held if nodes[number].op != "placeholder"]
        # Parameters with a default, and variadic ones, come last in a signature.
        late = [node for node in owned if node.args or str(node.target).startswith("*")]
        early = [node for node in owned if node not in late]
        writer.copy_run(early, self.env, [node.name for node in early])
        for node, name in inputs.items():
            # A result of another call has no type annotation, as the call has none.
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
        self.modes.restore()
        values = tuple(self.env[node] for node in outputs)
        name = self.writer.names.fresh("output")
        self.writer.write("output", "output", (values[0] if is_bare else values,), name=name)
        graph = self.writer.close()
        self.modes.close()
        return graph


def _runs(program: Program, numbers: Sequence[int]) -> Iterator[tuple[Mode | None, list[int]]]:
    """Runs of nodes with one mode; None where the mode does not matter."""
    by_number = program.modes.by_number
    if by_number is None:
        yield None, list(numbers)
        return
    # By identity: two blocks may set the same.
    for _, run in groupby(numbers, lambda number: id(by_number[number]) if _has_mode(program, number) else None):
        held = list(run)
        yield by_number[held[0]] if _has_mode(program, held[0]) else None, held


def _has_mode(program: Program, number: int) -> bool:
    """Reading an input or an attribute, or computing with numbers, means the same in every mode."""
    if number in program.modes.toggles or number in program.symbolic_scalars:
        return False
    return program.index.nodes[number].op not in ("placeholder", "get_attr")


def _share_attributes(root: nn.Module, module: nn.Module, nodes: Iterable[Node]) -> None:
    """Sets the attributes that the nodes name on `module`, at the same paths: whole modules before their contents."""
    named: Mapping[str, Any] = {str(node.target): attribute_of(root, node) for node in nodes}
    for path, value in sorted(named.items(), key=lambda entry: entry[0].count(".")):
        if value is None or find(module, path) is not value:
            place(module, path, value, persistent=_is_saved(root, path))


def _is_saved(root: nn.Module, path: str) -> bool:
    """Whether `path` is a buffer that is saved with `root`; a tensor that is a plain attribute is not."""
    folder, _, name = path.rpartition(".")
    holder = find(root, folder) if folder else root
    return isinstance(holder, nn.Module) and name in holder._buffers and is_persistent(root, path)
