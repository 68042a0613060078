"""The outer graph of a cut program: its inputs, a call for each region, what stands alone, and its output."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from partita._torch.nodes import GraphWriter, map_nodes
from partita._torch.operators import SYM_SIZE
from partita.graphs.attributes import attribute_of
from partita.graphs.mode import AMBIENT, Mode
from partita.graphs.module_stacks import outermost_stack
from partita.graphs.program import Program
from partita.graphs.symbols import Dimension
from partita.graphs.values import VALUE_KEYS
from partita.regions.borders import Crossing, Item
from partita.regions.partition import Partition
from partita.rewrite.bodies import PLAIN_BODY, Body, BodyStyle, meta_of_crossing, name_of_crossing, rebuilt
from partita.rewrite.mode_writer import ModeWriter

__all__ = ["OuterGraph", "OutlineStyle", "Surroundings", "style_for"]


@dataclass(frozen=True, slots=True)
class OutlineStyle:
    """How an outlined program is written down; the defaults are Partita's own, `compat` asks for torch's."""

    body: BodyStyle = PLAIN_BODY
    #: Reads of attributes come first, in one block, instead of where they stood.
    attributes_first: bool = False
    #: Nodes of the outer graph are called like the nodes of the old graph that they stand for.
    keeps_outer_names: bool = True
    #: The type that the old graph returns is written down again.
    annotates_output: bool = True
    #: State that no node names is kept as well.
    keeps_unused_state: bool = True


def style_for(program: Program) -> OutlineStyle:
    """Partita's own style, as the kind of program needs it."""
    return OutlineStyle() if program.export is None else OutlineStyle(replace(PLAIN_BODY, returns_something=True))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The modes in which each region is called, those in which its body then runs, and what is left in the end."""

    around: Sequence[Mode]
    inside: Sequence[Mode]
    final: Mode

    @classmethod
    def unknown(cls, regions: int, final: Mode) -> Surroundings:
        """Bodies that are called as the program is, and set what they need."""
        return cls([AMBIENT] * regions, [AMBIENT] * regions, final)


class OuterGraph:
    """The outer graph while it is written: `env` gives new values for old nodes, `loose` for what else crosses."""

    def __init__(
        self, partition: Partition, names: Sequence[str], style: OutlineStyle, surroundings: Surroundings
    ) -> None:
        self.partition, self.style, self.surroundings = partition, style, surroundings
        self.program = partition.program
        self.root = partition.program.graph_module
        self.nodes = self.program.index.nodes
        self.writer = GraphWriter(self.program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer, caller=self.program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(self.program.modes.read)
        self.loose: dict[Item | Dimension, Node] = {}
        self.names = tuple(names)

    def write(self, order: Sequence[int], bodies: Sequence[Body]) -> Graph:
        """The graph with its calls and single nodes in this order."""
        self._write_inputs()
        modes, regions = self.program.modes, len(self.partition)
        for vertex in order:
            if vertex < regions:
                if not self.style.body.returns_something or bodies[vertex].does_something:
                    self.modes.switch(self.surroundings.around[vertex])
                    self._write_call(self.names[vertex], bodies[vertex])
            elif self.nodes[vertex - regions] not in self.env and not self._is_read_inside_only(vertex - regions):
                node = self.nodes[vertex - regions]
                # Reading an attribute, or computing with numbers, means the same in every mode.
                if node.op != "get_attr" and vertex - regions not in self.program.symbolic_scalars:
                    self.modes.switch(modes.at(vertex - regions))
                self._write_alone(node)
        self._write_output()
        graph = self.writer.close()
        self.modes.close()
        return graph

    def _write_inputs(self) -> None:
        """The placeholders, with the reads of attributes among them where the style asks for that."""
        if self.style.keeps_outer_names:
            self.writer.names.reserve(self._kept_names())
        ops = ("placeholder", "get_attr") if self.style.attributes_first else ("placeholder",)
        for node in self.nodes:
            if node.op in ops:
                self._write_alone(node)
        self._write_sizes_of_inputs()

    def _write_sizes_of_inputs(self) -> None:
        """Sizes that symbols stand for are read before anything can change the shape of an input."""
        for border in self.partition.borders.of_regions:
            for crossing in border.inputs:
                if isinstance(crossing, Dimension) and self.nodes[crossing.number].op == "placeholder":
                    self._crossing(crossing)

    def _kept_names(self) -> set[str]:
        """The names of the old nodes that have a node in the outer graph as well."""
        owner, borders = self.partition.owner, self.partition.borders.of_regions
        kept = {node.name for node, place in zip(self.nodes, owner, strict=True) if place < 0}
        given = (crossing for border in borders for crossing in border.outputs)
        return kept | {self.nodes[crossing].name for crossing in given if isinstance(crossing, int)}

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
            self._give(outputs[0], call)
            return
        for at, crossing in enumerate(outputs):
            item = self.writer.write("call_function", operator.getitem, (call, at), name=self._name_of_item(crossing))
            self._give(crossing, item)
        _copy_values(tuple(map(self._crossing, outputs)), call)

    def _give(self, crossing: int | Item, value: Node) -> None:
        """Notes that `value` stands for `crossing` from here on."""
        if isinstance(crossing, Item):
            source = self.nodes[crossing.number]
            value.meta.update(meta_of_crossing(crossing, source))
            self._place_in_model(value, source)
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
        return self.writer.names.fresh(node.name) if keeps else self.writer.names.fresh_for(node.target)

    def _crossing(self, crossing: Crossing) -> Any:
        """The value in the outer graph of something that crosses; items and sizes are read when first needed."""
        if isinstance(crossing, int):
            return self._value(self.nodes[crossing])
        if crossing not in self.loose:
            source = self.nodes[crossing.number]
            place, target = (
                (crossing.axis, SYM_SIZE) if isinstance(crossing, Dimension) else (crossing.place, operator.getitem)
            )
            name = self.writer.names.fresh(name_of_crossing(crossing, source))
            node = self.writer.write("call_function", target, (self._value(source), place), name=name)
            node.meta.update(meta_of_crossing(crossing, source))
            self._place_in_model(node, source)
            self.loose[crossing] = node
        return self.loose[crossing]

    def _place_in_model(self, node: Node, source: Node) -> None:
        """`torch.export.unflatten` wants to know of every node where it belongs."""
        if self.program.export is not None:
            stack = source.meta.get("nn_module_stack")
            node.meta["nn_module_stack"] = stack or outermost_stack(self.program.graph)

    def _value(self, node: Node) -> Any:
        """The new value of `node`; a container that came in items is put together when first needed."""
        if node not in self.env:
            number = self.program.index.number[node]
            self.env[node] = rebuilt(self.writer, node, number, self.loose)
        return self.env[node]

    def _write_output(self) -> None:
        output = self.nodes[-1]
        args = map_nodes(output.args, self._value)
        self.modes.switch(self.surroundings.final)
        returns = output.type if self.style.annotates_output else None
        node = self.writer.write("output", "output", args, name=self._name_for(output), type_expr=returns)
        self.writer.copy_meta(output, node)


def _copy_values(nodes: tuple[Node, ...], call: Node) -> None:
    """The traced value of a call is the tuple of the values that it gives."""
    for key in VALUE_KEYS:
        if nodes and all(key in node.meta for node in nodes):
            call.meta[key] = tuple(node.meta[key] for node in nodes)
