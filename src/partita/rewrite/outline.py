"""Outlining: each region becomes a call of its body, in a new program that shares the state; gathering, marking."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import ADDED_BY_EXPORT, FreeNames, GraphWriter, identifier, map_nodes
from partita._torch.fx.lazy_graph_module import LazyModule, lazy_module
from partita._torch.gc_pause import gc_paused
from partita._torch.operator_schemas import SYM_SIZE
from partita.analysis.modes import AMBIENT, Mode
from partita.analysis.nodes import VALUE_KEYS, attribute_of, find, outermost_stack
from partita.analysis.symbols import Dimension
from partita.analysis.tolerance import EXACT, Tolerance
from partita.program.program import Program, summation_tolerance, uses_autocast
from partita.regions import Partition
from partita.regions.borders import Constant, Crossing, Item
from partita.rewrite.bodies import PLAIN_BODY, Body, BodyStyle, meta_of_crossing, name_of_crossing, rebuilt, write_body
from partita.rewrite.mode_nodes import ModeWriter
from partita.rewrite.operator_calls import PLAIN_CALL, call_through
from partita.rewrite.state import is_persistent, module_like, place, share_state, unique_names


@dataclass(frozen=True, slots=True)
class OutlineStyle:
    """How an outlined program is written; the defaults are Partita's own, `compat` uses torch's."""

    body: BodyStyle = PLAIN_BODY
    #: Reads of attributes come first, in one block, instead of at their old positions.
    attributes_first: bool = False
    #: Nodes of the outer graph keep the names of the old nodes that they correspond to.
    keeps_outer_names: bool = True
    #: The return annotation of the old graph is kept.
    annotates_output: bool = True
    #: Unused state is kept as well.
    keeps_unused_state: bool = True


#: A call without results has no place in an exported program.
EXPORT_STYLE = OutlineStyle(replace(PLAIN_BODY, returns_something=True, names_integers=True))


@dataclass(frozen=True, slots=True)
class CallModes:
    """The modes in which each region is called, those in which its body then runs, and the final mode."""

    around: Sequence[Mode]
    inside: Sequence[Mode]
    final: Mode

    @classmethod
    def unknown(cls, regions: int, final: Mode) -> CallModes:
        """Bodies that are called in the modes of the program, and set what they need."""
        return cls([AMBIENT] * regions, [AMBIENT] * regions, final)


@dataclass(frozen=True, slots=True)
class Outlined:
    """The new module; for each region its attribute name and body; the old path of every module that moved.

    Regions that share a body have the same module under their names.
    """

    graph_module: GraphModule
    names: tuple[str, ...]
    bodies: tuple[LazyModule, ...]
    moved: dict[str, str]
    #: How far gradients may move because nodes run in another order, or in other autocast blocks.
    tolerance: Tolerance


def outline(partition: Partition) -> Program:
    """A new program in which every region is one call of its body, as `Plan.apply` makes it before any treatment."""
    program, result = partition.program, outlined(partition)
    if program.export is not None:
        call_through(result.graph_module, dict.fromkeys(result.names, PLAIN_CALL))
    keys = program.state_keys.then(result.moved)
    return program.rewritten(result.graph_module, state_keys=keys, tolerance=result.tolerance)


def outlined(
    partition: Partition,
    *,
    names: Sequence[str] | None = None,
    order: Sequence[int] | None = None,
    style: OutlineStyle | None = None,
    call_modes: CallModes | None = None,
    shared: Sequence[int] | None = None,
) -> Outlined:
    """A program in which every region is one call.

    `names` are the attributes that hold the bodies; without them, the regions' names, numbered where they are taken.
    `order` may be any order that the partition allows. `call_modes` are the modes of calls and bodies; without them,
    bodies set all modes themselves. `shared` has for each region the one whose body it calls, not after it; without it,
    each calls its own.
    """
    program = partition.program
    if names is None:
        names = unique_names([region.name for region in partition], program.graph_module)
    order = order or partition.order
    style = style or (OutlineStyle() if program.export is None else EXPORT_STYLE)
    call_modes = call_modes or CallModes.unknown(len(partition), program.modes.final)
    with gc_paused():
        numbers = partition.numbers()
        shared = range(len(partition)) if shared is None else shared
        bodies: list[Body] = []
        for at, held in enumerate(numbers):
            bodies.append(
                write_body(partition, at, held, style.body, base=call_modes.inside[at])
                if shared[at] == at
                else bodies[shared[at]].called_by(partition.borders.of_regions[at])
            )
        outer = OuterGraph(partition, names, style, call_modes)
        graph = outer.write(order, bodies)
        base = module_like(program.graph_module, graph, restores_modes=outer.modes.has_switched)
        parts = dict(zip(names, _modules(partition, bodies, style, shared), strict=True))
        moved = {
            f"{name}.{local}": original
            for name, body in zip(names, bodies, strict=True)
            for local, original in body.targets.items()
        }
        replaced = {target for at in range(len(partition)) if shared[at] != at for target in _bodies_in(partition, at)}
        gone = replaced.union(moved.values())
        # Plain attributes: state dicts have no such names, and `half` and `to` leave the tensors as they are.
        vars(base).update(outer.constants)
        _place_state(program.graph_module, base, parts, gone, keeps_unused=style.keeps_unused_state)
    moves_sums = uses_autocast(program) or _is_reordered(partition, numbers, order)
    tolerance = summation_tolerance(program) if moves_sums else EXACT
    return Outlined(base, tuple(names), tuple(parts.values()), moved, tolerance)


def gather(partition: Partition) -> Program:
    """A new program, equal to the old one, in which the nodes of each region are adjacent."""
    program = partition.program
    index, modes, root = program.index, program.modes, program.graph_module
    with gc_paused():
        writer = GraphWriter.like(program.graph)
        writer.names.reserve(node.name for node in index.nodes)
        switching = ModeWriter(writer, caller=program.caller)
        env: dict[Node, Node | None] = dict.fromkeys(modes.read)
        numbers = _gathered_numbers(partition)
        for number in numbers:
            node = index.nodes[number]
            if node.op != "get_attr":  # Reading an attribute is the same in every mode.
                switching.end_in(modes.final) if node.op == "output" else switching.switch(modes.at(number))
            env[node] = writer.copy(node, env.__getitem__, name=node.name)
        graph = writer.close()
        switching.close()
        module = module_like(root, graph, restores_modes=switching.has_switched)
        share_state(root, module, without=frozenset())
    return program.rewritten(module, tolerance=EXACT if numbers == sorted(numbers) else summation_tolerance(program))


def marked(program: Program, marks: Mapping[Node, Mapping[str, object]]) -> Program:
    """A copy of `program` with more metadata on these nodes; the original is not changed."""
    module = outlined(Partition(program, ())).graph_module
    by_name = {node.name: values for node, values in marks.items()}
    for node in module.graph.nodes:
        node.meta.update(by_name.get(node.name, {}))
    return program.rewritten(module)


def add_marks(body: GraphModule, marks: Mapping[str, object]) -> None:
    """Adds `marks` to the metadata of every operator of a new body."""
    for node in body.graph.nodes if marks else ():
        if node.op not in ("placeholder", "output"):
            node.meta.update(marks)


def with_bodies(program: Program, bodies: Mapping[str, GraphModule]) -> Program:
    """A copy of `program` whose operators run these bodies, by path; the original is not changed."""
    module = outlined(Partition(program, ())).graph_module
    # Nested modules may be shared with the original, so these bodies move to the top.
    deep = [path for path in bodies if "." in path]
    names = unique_names([path.replace(".", "_") for path in deep], module)
    moved = dict(zip(deep, names, strict=True))
    for node in module.graph.find_nodes(op="get_attr"):
        node.target = moved.get(str(node.target), node.target)
    for path, body in bodies.items():
        module._modules[moved.get(path, path)] = body
    return program.rewritten(module)


def _gathered_numbers(partition: Partition) -> list[int]:
    nodes, regions = partition.program.index.nodes, len(partition)
    held = partition.numbers()
    gathered = [number for number, node in enumerate(nodes) if node.op == "placeholder"]
    for vertex in partition.order:
        gathered += held[vertex] if vertex < regions else [vertex - regions]
    # A node that several regions have a copy of is written once, where it is first needed.
    return [*dict.fromkeys(gathered), len(nodes) - 1]


def _modules(
    partition: Partition, bodies: Sequence[Body], style: OutlineStyle, shared: Sequence[int]
) -> list[LazyModule]:
    """A module for each body, with the modules that it calls."""
    restores_grad = style.body.caller_grad is not None
    root, owner = partition.program.graph_module, partition.owner
    impure = {shared[owner[number]] for number in partition.program.effects.effectful if owner[number] >= 0}
    modules: list[LazyModule] = []
    for at, body in enumerate(bodies):
        if shared[at] != at:
            modules.append(modules[shared[at]])
            continue
        module = lazy_module(
            body.graph,
            training=root.training,
            restores_modes=body.switches_modes,
            restores_grad=body.switches_modes and restores_grad,
            is_impure=at in impure,
            is_part=True,
        )
        for local, original in body.targets.items():
            place(module, local, root.get_submodule(original))
        modules.append(module)
    return modules


def _bodies_in(partition: Partition, at: int) -> Iterator[str]:
    """The bodies of the operators of a region, by path."""
    nodes = partition.program.index.nodes
    yield from (str(nodes[number].target) for number in partition.borders.of_regions[at].modules)


def _place_state(
    root: GraphModule, base: GraphModule, parts: dict[str, LazyModule], gone: Collection[str], *, keeps_unused: bool
) -> None:
    """Sets parts and state at the targets of the outer graph: short paths first, then in graph order, like torch."""
    named = {str(node.target): node for node in base.graph.nodes if node.op in ("get_attr", "call_module")}
    if keeps_unused:
        share_state(root, base, without=frozenset(gone) - named.keys())
    for path, node in sorted(named.items(), key=lambda entry: entry[0].count(".")):
        if path in parts:
            place(base, path, parts[path])
        elif find(base, path) is None:
            place(base, path, attribute_of(root, node), persistent=is_persistent(root, path))


def _argument_of(node: Node) -> str | None:
    """What the generated code calls the argument that a placeholder stands for; None for other nodes."""
    return str(node.target).lstrip("*") if node.op == "placeholder" else None


def _is_reordered(partition: Partition, numbers: Sequence[Sequence[int]], order: Sequence[int]) -> bool:
    last = -1
    nodes, scalars = partition.program.index.nodes, partition.program.symbolic_scalars
    for vertex in order:
        found = numbers[vertex] if vertex < len(numbers) else (vertex - len(numbers),)
        held = [number for number in found if number not in scalars] if scalars else found
        if not held or nodes[held[0]].op == "get_attr":
            continue
        if held[0] < last:
            return True
        last = held[-1]
    return False


class OuterGraph:
    """The outer graph while it is written: `env` maps old nodes to new values, `loose` items and sizes that cross."""

    def __init__(self, partition: Partition, names: Sequence[str], style: OutlineStyle, call_modes: CallModes) -> None:
        self.partition, self.style, self.call_modes = partition, style, call_modes
        self.program = partition.program
        self.root = partition.program.graph_module
        self.nodes = self.program.index.nodes
        self.writer = GraphWriter.like(self.program.graph)
        self.modes = ModeWriter(self.writer, caller=self.program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(self.program.modes.read)
        self.loose: dict[Item | Dimension | Constant, Node] = {}
        self.names = tuple(names)
        #: The arguments of the generated code, while their placeholders are written.
        self._arguments: set[str | None] = set()
        #: The numbers that are passed to regions, by the attributes that hold them.
        self.constants: dict[str, Tensor] = {}
        export = self.program.export
        state = () if export is None else (*export.state, *export.constants)  # The module does not have it.
        taken = ADDED_BY_EXPORT.union(names, (path.partition(".")[0] for path in state))
        self._free = FreeNames(lambda name: name in taken or hasattr(self.root, name))

    def write(self, order: Sequence[int], bodies: Sequence[Body]) -> Graph:
        """The graph with its calls and single nodes in this order."""
        self._write_inputs()
        modes, regions = self.program.modes, len(self.partition)
        for vertex in order:
            if vertex < regions:
                if not self.style.body.returns_something or bodies[vertex].does_something:
                    self.modes.switch(self.call_modes.around[vertex])
                    self._write_call(self.names[vertex], bodies[vertex])
            elif self.nodes[vertex - regions] not in self.env and not self._is_read_inside_only(vertex - regions):
                node = self.nodes[vertex - regions]
                # Reading an attribute, or computing with numbers, is the same in every mode.
                if node.op != "get_attr" and vertex - regions not in self.program.symbolic_scalars:
                    self.modes.switch(modes.at(vertex - regions))
                self._write_alone(node)
        self._write_output()
        graph = self.writer.close()
        self.modes.close()
        return graph

    def _write_inputs(self) -> None:
        """The placeholders, with the reads of attributes if the style wants them first, and sizes of inputs."""
        if self.style.keeps_outer_names:
            self.writer.names.reserve(self._kept_names())
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        if self.style.attributes_first:
            self._arguments.update(map(_argument_of, placeholders))
        for node in self.nodes if self.style.attributes_first else placeholders:
            if node.op in ("placeholder", "get_attr"):
                self._write_alone(node)
        self._arguments.clear()
        # Sizes are read before a mutation can change the shape of an input.
        for border in self.partition.borders.of_regions:
            for crossing in border.inputs:
                if isinstance(crossing, Dimension) and self.nodes[crossing.number].op == "placeholder":
                    self._crossing(crossing)

    def _kept_names(self) -> set[str]:
        """The names of the old nodes that have a node in the outer graph as well."""
        owner, borders = self.partition.owner, self.partition.borders.of_regions
        kept = {node.name for node, at in zip(self.nodes, owner, strict=True) if at < 0}
        results = (crossing for border in borders for crossing in border.outputs)
        return kept | {self.nodes[crossing].name for crossing in results if isinstance(crossing, int)}

    def _write_alone(self, node: Node) -> None:
        if node.op == "get_attr":
            attribute_of(self.root, node)
        self.env[node] = self.writer.copy(node, self._value, name=self._name_for(node))

    def _is_read_inside_only(self, number: int) -> bool:
        """Whether a node is a body of higher-order operators that all moved into regions."""
        node, owner, numbers = self.nodes[number], self.partition.owner, self.program.index.number
        return (
            node.op == "get_attr"
            and bool(node.users)
            and isinstance(attribute_of(self.root, node), GraphModule)
            and all(owner[numbers[user]] >= 0 for user in node.users)
        )

    def _write_call(self, name: str, body: Body) -> None:
        call = self.writer.write(
            "call_module", name, tuple(map(self._crossing, body.inputs)), name=self.writer.names.fresh_for(name)
        )
        outputs = body.outputs
        if not outputs:
            call.meta.update(body.filler_meta)
        if len(outputs) == 1 and not self.style.body.returns_tuple:
            self._define(outputs[0], call)
            return
        for at, crossing in enumerate(outputs):
            item = self.writer.write("call_function", operator.getitem, (call, at), name=self._name_of_item(crossing))
            self._define(crossing, item)
        results = tuple(map(self._crossing, outputs))
        for key in VALUE_KEYS:
            if results and all(key in node.meta for node in results):
                call.meta[key] = tuple(node.meta[key] for node in results)

    def _define(self, crossing: int | Item, value: Node) -> None:
        """Makes `value` the new value of `crossing`."""
        if isinstance(crossing, Item):
            source = self.nodes[crossing.number]
            value.meta.update(meta_of_crossing(crossing, source))
            self._set_module_stack(value, source)
            self.loose[crossing] = value
        else:
            source = self.nodes[crossing]
            self.writer.copy_meta(source, value)
            self.env[source] = value

    def _name_of_item(self, crossing: int | Item) -> str:
        names = self.writer.names
        if not self.style.keeps_outer_names:
            return names.fresh_for(operator.getitem)
        if isinstance(crossing, Item):
            return names.fresh(name_of_crossing(crossing, self.nodes[crossing.number]))
        return self.nodes[crossing].name

    def _name_for(self, node: Node) -> str:
        if self.style.keeps_outer_names:
            return node.name
        keeps = self.style.body.keeps_node_names and node.op == "placeholder"
        name = self.writer.names.fresh(node.name) if keeps else self.writer.names.fresh_for(node.target)
        # What comes before the placeholder of an argument must not assign to it. (In torch's split_module it does.)
        while name in self._arguments and name != _argument_of(node):
            name = self.writer.names.fresh(name)
        return name

    def _crossing(self, crossing: Crossing) -> Any:
        """The value in the outer graph of something that crosses; items and sizes are read when first needed."""
        if isinstance(crossing, int):
            return self._value(self.nodes[crossing])
        if isinstance(crossing, Constant):
            return self._constant(crossing)
        if crossing not in self.loose:
            source = self.nodes[crossing.number]
            index, target = (
                (crossing.axis, SYM_SIZE) if isinstance(crossing, Dimension) else (crossing.place, operator.getitem)
            )
            name = self.writer.names.fresh(name_of_crossing(crossing, source))
            node = self.writer.write("call_function", target, (self._value(source), index), name=name)
            node.meta.update(meta_of_crossing(crossing, source))
            self._set_module_stack(node, source)
            self.loose[crossing] = node
        return self.loose[crossing]

    def _constant(self, crossing: Constant) -> Node:
        """A read of the tensor that stands for a number; each call has its own."""
        if crossing not in self.loose:
            source = self.nodes[crossing.number]
            target = self._free.take(identifier(name_of_crossing(crossing, source)))
            self.constants[target] = self.partition.constants[crossing.number].tensor()
            node = self.writer.write("get_attr", target, name=self.writer.names.fresh(target))
            node.meta.update(meta_of_crossing(crossing, source))
            self._set_module_stack(node, source)
            self.loose[crossing] = node
        return self.loose[crossing]

    def _set_module_stack(self, node: Node, source: Node) -> None:
        """`torch.export.unflatten` needs the module stack of every node."""
        if self.program.export is not None:
            stack = source.meta.get("nn_module_stack")
            node.meta["nn_module_stack"] = stack or outermost_stack(self.program.graph)

    def _value(self, node: Node) -> Any:
        """The new value of `node`; a container that crossed item by item is rebuilt when first needed."""
        if node not in self.env:
            number = self.program.index.number[node]
            self.env[node] = rebuilt(self.writer, node, number, self.loose)
        return self.env[node]

    def _write_output(self) -> None:
        output = self.nodes[-1]
        args = map_nodes(output.args, self._value)
        self.modes.end_in(self.call_modes.final)
        returns = output.type if self.style.annotates_output else None
        node = self.writer.write("output", "output", args, name=self._name_for(output), type_expr=returns)
        self.writer.copy_meta(output, node)
