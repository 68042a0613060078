"""Bodies: the graph of one region, with its inputs first, its own modes set and restored, and its border as output."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from partita._torch.fake_tensors import fake_mode_of, to_fake
from partita._torch.fx.graph_writer import FreeNames, GraphWriter
from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.symbolic_shapes import constant_size
from partita.analysis.modes import AMBIENT, Mode, Modes
from partita.analysis.nodes import VALUE_KEYS, attribute_of, container_items, crossing_places, value_of
from partita.analysis.number_operands import number_operand
from partita.analysis.symbols import Dimension
from partita.errors import ModeError
from partita.program.program import Program
from partita.regions.borders import Border, Constant, Crossing, Item, item_taken
from partita.regions.partition import Partition
from partita.rewrite.mode_nodes import ModeWriter
from partita.rewrite.state import place


@dataclass(frozen=True, slots=True)
class BodyStyle:
    """How the nodes of a body are named, and whether a single output is wrapped."""

    keeps_node_names: bool = True
    keeps_input_names: bool = True
    returns_tuple: bool = True
    #: A body without results returns one of its tensors: torch.export cannot load a call without any output.
    returns_something: bool = False
    #: Inputs that are known integers have symbolic values: of others, torch.export saves the value and not the name.
    names_integers: bool = False
    #: The grad mode of the caller, a constant where the body restores it; restored by value if unknown.
    caller_grad: bool | None = None


PLAIN_BODY = BodyStyle()


@dataclass(frozen=True, slots=True)
class Body:
    """A region's graph, the crossings that are its inputs and outputs, and its own name for each target."""

    graph: Graph
    inputs: tuple[Crossing, ...]
    outputs: tuple[int | Item, ...]
    targets: dict[str, str]
    switches_modes: bool
    #: The traced value of the result of a body without outputs.
    filler_meta: Mapping[str, Any]

    @property
    def does_something(self) -> bool:
        """Whether any node runs in it: not if all of its nodes moved to the containers that they unpack."""
        return any(node.op not in ("placeholder", "output") for node in self.graph.nodes)

    def called_by(self, border: Border) -> Body:
        """The same body, for the call of another region, with results, whose body is equal."""
        return replace(self, inputs=tuple(border.inputs), outputs=tuple(border.outputs))


class BareBody(NamedTuple):
    """A body whose nodes all run under `mode`, which the caller has to set."""

    mode: Mode
    module: GraphModule


def write_body(
    partition: Partition, at: int, numbers: Sequence[int], style: BodyStyle, *, base: Mode = AMBIENT
) -> Body:
    """The body of the region at index `at`, whose nodes have these `numbers`, for a call in mode `base`."""
    return _BodyWriter(partition, at, style, base).body(numbers)


def bare_body(program: Program) -> BareBody:
    """`program`, the body of a region, without toggles; it must hold one mode."""
    if program.modes.by_number is None:
        return BareBody(AMBIENT, program.graph_module)
    return BareBody(_only_mode(program), _without_toggles(program))


def copy_mutated_inputs(body: GraphModule, mutated: Sequence[int], *, without: Collection[int] = ()) -> None:
    """Lets a body mutate copies of the inputs at `mutated`, which become its last outputs.

    The outputs at `without` are dropped.
    """
    graph = body.graph
    placeholders = graph.find_nodes(op="placeholder")
    contents = []
    with graph.inserting_after(placeholders[-1]):
        for position in mutated:
            original = placeholders[position]
            users = tuple(original.users)
            copied = graph.call_function(torch.clone, (original,))
            copied.meta.update(original.meta)
            for user in users:
                user.replace_input_with(original, copied)
            contents.append(copied)
    output = graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    output.args = ((*(value for position, value in enumerate(results) if position not in without), *contents),)
    body.recompile()


def rebuilt(writer: GraphWriter, source: Node, number: int, items: Mapping[Any, Any]) -> Any:
    """A container like the result of `source`, rebuilt from the items that crossed and constants."""
    traced = container_items(source)
    assert traced is not None
    values: list[Any] = list(traced)
    for position in crossing_places(traced):
        values[position] = items[Item(number, position)]
    value = value_of(source)
    if type(value) is torch.Size:
        node = writer.write("call_function", torch.Size, (tuple(values),), name=writer.names.fresh(source.name))
        writer.copy_meta(source, node)
        return node
    return values if type(value) is list else tuple(values)


def name_of_crossing(crossing: Crossing, source: Node) -> str:
    if isinstance(crossing, Item):
        place = crossing.place
        return f"{source.name}_item_{place}" if place >= 0 else f"{source.name}_item_{-place}_from_the_end"
    if isinstance(crossing, Constant):
        return f"{source.name}_number"
    return f"{source.name}_size_{crossing.axis}" if isinstance(crossing, Dimension) else source.name


def meta_of_crossing(crossing: Item | Dimension | Constant, source: Node) -> dict[str, Any]:
    """The traced value of an item, a size or a number, under the names that its source uses."""
    if isinstance(crossing, Constant):
        return _meta_of_number(source)
    found = {}
    for key in VALUE_KEYS:
        if key in source.meta:
            value = source.meta[key]
            found[key] = value[crossing.place] if isinstance(crossing, Item) else value.shape[crossing.axis]
    return found


def _meta_of_number(source: Node) -> dict[str, Any]:
    operand = number_operand(source)
    assert operand is not None
    found = {}
    for key in VALUE_KEYS:
        if key in source.meta:
            mode = fake_mode_of(source.meta[key])
            found[key] = operand.tensor() if mode is None else to_fake(operand.tensor(), mode)
    return found


def _only_mode(program: Program) -> Mode:
    """The mode of all nontrivial nodes; items of containers and numbers are the same in every mode."""
    modes = program.modes
    trivial = modes.toggles | program.symbolic_scalars | program.projections.keys()
    first: int | None = None
    for number, node in enumerate(program.index.nodes):
        if number in trivial or node.op in ("placeholder", "get_attr", "output"):
            continue
        first = number if first is None else first
        if modes.at(number) != modes.at(first):
            raise ModeError(
                f"{program.index.nodes[first].name!r} runs under {modes.at(first)} and {node.name!r} under "
                f"{modes.at(number)}, but a body is compiled in one mode; cut it where the mode changes"
            )
    return AMBIENT if first is None else modes.at(first)


def _without_toggles(program: Program) -> GraphModule:
    source, nodes, toggles = program.graph_module, program.index.nodes, program.modes.toggles
    writer = GraphWriter(program.graph._tracer_cls)
    kept = [node for number, node in enumerate(nodes) if number not in toggles]
    writer.names.reserve(node.name for node in kept)
    # The result of a toggle, where it is used, is None.
    env: dict[Node, object] = dict.fromkeys(program.modes.read)
    writer.copy_run(kept, env, [node.name for node in kept])
    graph = writer.close()
    module = lazy_module(
        graph, training=source.training, is_impure=bool(getattr(source, "_is_impure", False)), is_part=True
    )
    for path in {str(node.target): None for node in kept if node.op in ("get_attr", "call_module")}:
        place(module, path, source.get_submodule(path))
    return module


class _BodyWriter:
    """One body while it is written: `env` maps old nodes to new values."""

    def __init__(self, partition: Partition, at: int, style: BodyStyle, base: Mode) -> None:
        program = partition.program
        self.program: Program = program
        self.border: Border = partition.borders.of_regions[at]
        self.style, self.base = style, base
        self.kept = partition.kept
        self.nodes = program.index.nodes
        self.writer = GraphWriter(program.graph._tracer_cls)
        kept = _toggles_in(partition, at) if style.keeps_node_names else ()
        self.writer.names.reserve(node.name for node in kept)
        self.modes = ModeWriter(self.writer, base, caller=program.caller, originals=kept)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        self.items: dict[Item, Any] = {}
        #: What replaces the numbers among the operands of old nodes.
        self.constants: dict[Node, Node] = {}
        self.targets: dict[str, str] = {}
        self.locals: dict[str, str] = {}
        self.free = FreeNames()

    def body(self, numbers: Sequence[int]) -> Body:
        if self.style.keeps_node_names:
            self.writer.names.reserve(self.nodes[number].name for number in numbers)
        # A region that keeps any node which takes an item holds nothing else.
        takes_items = not self.kept.isdisjoint(numbers)
        inputs = self._write_inputs(rebuilds=not takes_items)
        if takes_items:
            for number in numbers:
                taken = item_taken(self.program.index, number)
                self.env[self.nodes[number]] = self.items.get(taken) if isinstance(taken, Item) else taken
        else:
            self._write_nodes(numbers)
        outputs = tuple(self.border.outputs)
        values = tuple(map(self._output, outputs))
        self.modes.restore(grad=self.style.caller_grad)
        filler = None if values or not self.style.returns_something else self._some_tensor(numbers)
        if filler is not None:
            values = (filler,)
        bare = len(values) == 1 and not self.style.returns_tuple
        self.writer.write("output", "output", (values[0] if bare else values,), name=self.writer.names.fresh("output"))
        graph = self.writer.close()
        self.modes.close()
        filler_meta: dict[str, Any] = {"val": ()} if self.style.returns_something else {}
        if filler is not None:
            filler_meta = {key: (filler.meta[key],) for key in VALUE_KEYS if key in filler.meta}
        return Body(graph, inputs, outputs, self.targets, self.modes.has_switched, filler_meta)

    def _write_inputs(self, *, rebuilds: bool) -> tuple[Crossing, ...]:
        passed = tuple(self.border.inputs)
        for position, crossing in enumerate(passed):
            self._write_placeholder(position, crossing)
        for number in self.border.modules:
            self._write_module(self.nodes[number])
        apart = (crossing.number for crossing in passed if isinstance(crossing, Item))
        for number in dict.fromkeys((*apart, *self.border.empty)) if rebuilds else ():
            self.env[self.nodes[number]] = rebuilt(self.writer, self.nodes[number], number, self.items)
        return passed

    def _write_placeholder(self, position: int, crossing: Crossing) -> None:
        writer, source = self.writer, self.nodes[crossing if isinstance(crossing, int) else crossing.number]
        name = name_of_crossing(crossing, source) if self.style.keeps_input_names else f"arg_{position}"
        chosen = writer.names.fresh(name) if self.style.keeps_node_names else writer.names.fresh_for(name)
        type_expr = source.type if isinstance(crossing, int) else None
        placeholder = writer.write("placeholder", name, name=chosen, type_expr=type_expr)
        if isinstance(crossing, int):
            writer.copy_meta(source, placeholder)
            self.env[source] = placeholder
        else:
            placeholder.meta.update(meta_of_crossing(crossing, source))
            if isinstance(crossing, Item):
                self.items[crossing] = placeholder
            elif isinstance(crossing, Constant):
                self.constants[source] = placeholder
        if self.style.names_integers and type(placeholder.meta.get("val")) is int:
            placeholder.meta["val"] = constant_size(placeholder.meta["val"])

    def _write_module(self, node: Node) -> None:
        """A read of the body of a higher-order operator, or a call of a module, under a path inside this body."""
        target = self._local_target(str(node.target))
        if not self.style.keeps_node_names:
            name = self.writer.names.fresh_for(target)
        else:
            name = self.writer.names.fresh(node.name) if node.op == "get_attr" else node.name
        self.env[node] = self.writer.copy(node, self.env.__getitem__, name=name, target=target)

    def _write_nodes(self, numbers: Sequence[int]) -> None:
        modes: Modes = self.program.modes
        if modes.by_number is None:
            self._write_run(numbers)
            return
        by_number, scalars = modes.by_number, self.program.symbolic_scalars
        at: list[Mode | None] = []
        for number in numbers:
            # A scalar is the same in every mode, so it runs in that of the node before it.
            at.append(by_number[number] if number not in scalars else at[-1] if at else None)
        # By identity: two blocks may set the same.
        for _, run in groupby(zip(at, numbers, strict=True), lambda pair: id(pair[0])):
            held = list(run)
            if held[0][0] is not None:
                self.modes.switch(held[0][0])
            self._write_run([number for _, number in held])

    def _write_run(self, numbers: Sequence[int]) -> None:
        plain: list[Node] = []
        for node in (self.nodes[number] for number in numbers):
            if node.op == "call_module":
                self._write_plain(plain)
                plain = []
                attribute_of(self.program.graph_module, node)
                self._write_module(node)
            elif node in self.constants:
                self._write_plain(plain)
                plain = []
                self._write_with_number(node)
            else:
                plain.append(node)
        self._write_plain(plain)

    def _write_plain(self, nodes: list[Node]) -> None:
        keeps, names = self.style.keeps_node_names, self.writer.names
        chosen = [node.name for node in nodes] if keeps else names.fresh_for_all([node.target for node in nodes])
        self.writer.copy_run(nodes, self.env, chosen)

    def _write_with_number(self, node: Node) -> None:
        """A node that reads a tensor in the place of a number."""
        operand, names = number_operand(node), self.writer.names
        assert operand is not None
        arguments = operand.arguments(self.env[node.args[1 - operand.place]], self.constants[node])  # type: ignore[index]
        name = node.name if self.style.keeps_node_names else names.fresh_for(operand.target)
        written = self.writer.write(node.op, operand.target, arguments, name=name, type_expr=node.type)
        self.writer.copy_meta(node, written)
        self.env[node] = written

    def _local_target(self, target: str) -> str:
        """A path inside the body: the old one joined by underscores, numbered where another one has that name."""
        local = self.locals.get(target)
        if local is None:
            local = self.free.take(target.replace(".", "_"))
            self.targets[local], self.locals[target] = target, local
        return local

    def _some_tensor(self, numbers: Sequence[int]) -> Node | None:
        """The last tensor that the body computes, or one of its inputs; a number if there is no tensor."""
        computed = (self.env[self.nodes[number]] for number in reversed(numbers))
        inputs = self.writer.graph.find_nodes(op="placeholder")
        known = [node for node in (*computed, *inputs) if isinstance(node, Node) and value_of(node) is not None]
        tensors = (node for node in known if isinstance(value_of(node), torch.Tensor))
        # A truth value is an `int` too, but torch.export (2.13) loads no call that returns one.
        return next(tensors, next((node for node in known if type(value_of(node)) in (torch.SymInt, int)), None))

    def _output(self, crossing: int | Item) -> Any:
        if not isinstance(crossing, Item):
            return self.env[self.nodes[crossing]]
        if crossing not in self.items:
            source = self.nodes[crossing.number]
            name = self.writer.names.fresh(name_of_crossing(crossing, source))
            item = self.writer.write("call_function", operator.getitem, (self.env[source], crossing.place), name=name)
            item.meta.update(meta_of_crossing(crossing, source))
            self.items[crossing] = item
        return self.items[crossing]


def _toggles_in(partition: Partition, at: int) -> tuple[Node, ...]:
    """The mode toggles of a region, which are rewritten where its body switches modes."""
    program = partition.program
    if not program.modes.toggles:
        return ()
    number, toggles = program.index.number, program.modes.toggles
    return tuple(node for node in partition.regions[at].nodes if number[node] in toggles)
