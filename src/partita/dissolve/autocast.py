"""Replaces autocast blocks by the casts that autocast performs, as exports such as ONNX need them.

A dry run determines what autocast does to each node (`autocast_trace`); the new graph is written from that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.operator_schemas import SYM_SIZE, is_higher_order
from partita._torch.pytrees import map_leaves, tensors_in
from partita._torch.symbolic_shapes import write_number
from partita.analysis.modes import Inference, Mode
from partita.analysis.nodes import value_of
from partita.analysis.symbols import Dimension, Symbols
from partita.dissolve._torch.operator_recorder import Label, Step, labels_in
from partita.dissolve._torch.sandbox import FakeSandbox, TensorMetadata
from partita.dissolve.autocast_trace import (
    AutocastDryRun,
    CastArguments,
    Decomposed,
    Place,
    Places,
    Unchanged,
    check_value,
)
from partita.dissolve.grad import records_gradients
from partita.dissolve.traced_values import nodes_read, sandbox_for, value_read, write_beside
from partita.errors import ModeError
from partita.program.program import Program
from partita.rewrite.mode_nodes import ModeWriter
from partita.rewrite.state import module_like, share_state

_TO = torch.ops.aten.to.dtype


def dissolve_autocast(program: Program) -> Program:
    """A flat program without autocast blocks; the same object if none of its nodes runs in one."""
    modes, caller = program.modes, program.caller
    if not caller.autocast and not any(mode.autocast or mode.blocks for mode in modes.by_number or ()):
        return program
    sandbox = sandbox_for(program)
    with sandbox.opened(), closing(AutocastDryRun(program, sandbox)) as dry_run:
        return _Caster(program, sandbox, dry_run).dissolved()


class _Caster:
    """The new graph while it is written."""

    def __init__(self, program: Program, sandbox: FakeSandbox, dry_run: AutocastDryRun) -> None:
        self.program, self.sandbox, self.dry_run = program, sandbox, dry_run
        self.writer = GraphWriter.like(program.graph)
        self.modes = ModeWriter(self.writer)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        #: The casts that were written: autocast may have cached them.
        self.casts: dict[Label, Node] = {}
        self.sizes = SizeWriter(program, self.writer, self.env)

    def dissolved(self) -> Program:
        program, modes = self.program, self.program.modes
        self.writer.names.reserve(node.name for node in program.index.nodes)
        projections = frozenset(program.projections)
        for number, node in enumerate(program.index.nodes):
            if number in modes.toggles:
                continue
            mode = modes.final if node.op == "output" else modes.at(number)
            if number in projections and isinstance(self.env[node.args[0]], tuple | list):  # type: ignore[index]
                self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            elif number in projections or not _computes(node):
                self._copy(node, mode)
            else:
                self._write(node, mode)
        graph = self.writer.close()
        self.modes.close()
        _erase_unused_attributes(graph, program)
        module = module_like(program.graph_module, graph, restores_modes=self.modes.has_switched)
        share_state(program.graph_module, module, without=frozenset())
        return program.rewritten(module)

    def _write(self, node: Node, mode: Mode) -> None:
        if node.target in _CAST_IN_KERNEL and any(autocast.enabled for autocast in mode.autocast):
            raise ModeError(
                f"node {node.name!r} calls {node.target}, whose kernel casts under autocast where no trace sees it; "
                "write it as matrix products in the model, or switch autocast off around it"
            )
        within = mode.within(self.program.caller).autocast
        on_cpu = next((autocast for autocast in within if autocast.enabled and autocast.device == "cpu"), None)
        if node.target in _ONEDNN_KERNELS and on_cpu is not None:
            self._write_with_casts(node, mode, on_cpu.dtype or torch.get_autocast_dtype("cpu"))
            return
        found = self.dry_run.of(node, mode)
        if isinstance(found, Unchanged):
            self._copy(node, mode)
        elif isinstance(found, CastArguments):
            known = self._known(node, found.places, found.casts)
            for step in found.casts:
                self._write_cast(node, step, mode, known)
            self._copy(node, mode, {place: self.casts[label] for place, label in found.by_place.items()})
        else:
            self._write_steps(node, found, mode)

    def _write_with_casts(self, node: Node, mode: Mode, dtype: torch.dtype) -> None:
        """Writes the node on casts of all its tensors.

        Torch itself would run a oneDNN kernel, which other machines do not have, or not for this dtype.
        """
        check_value(node, [dtype] * len(tensors_in(value_of(node))))
        self.modes.switch(_without_autocast(mode))
        by_place = {}
        for place, read in enumerate(nodes_read(node)):
            value = value_read(self.program, read)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype:
                cast = self.sandbox.made(TensorMetadata.of(value)._replace(dtype=dtype))
                by_place[place] = write_beside(self.writer, node, _TO, (self.env[read], dtype), value=cast)
        self._copy(node, mode, by_place)

    def _copy(self, node: Node, mode: Mode, by_place: dict[int, Node] | None = None) -> None:
        if node.op != "get_attr":
            self.modes.switch(_without_autocast(mode))
        place = -1

        def replacement(read: Node) -> Any:
            nonlocal place
            place += 1
            return by_place[place] if by_place and place in by_place else self.env[read]

        self.env[node] = self.writer.copy(node, replacement, name=node.name)

    def _write_cast(self, node: Node, step: Step, mode: Mode, known: dict[Label, Any]) -> None:
        label = step.cast
        assert label is not None
        assert label.cast_of is not None
        self._switch(step, mode)
        (look,) = step.metadata
        value = self.sandbox.made(look)
        self.casts[label] = write_beside(self.writer, node, _TO, (known[label.cast_of], look.dtype), value=value)

    def _write_steps(self, node: Node, found: Decomposed, mode: Mode) -> None:
        recorded = found.recorded
        known = self._known(node, found.places, recorded.steps, recorded.result) | self.casts
        steps = StepWriter(node, self.writer, self.sandbox, known, lambda size: self.sizes.size(size, node))
        names = self._names(node, recorded.result, known)
        # An in-place operator returns a tensor that an earlier step made: the last one gets the name.
        last = {label: step for step in recorded.steps for label in labels_in(step.result)}
        for step in recorded.steps:
            if step.cast is None:
                self._switch(step, mode)
                steps.write(step, {label: name for label, name in names.items() if last[label] is step})
            else:
                self._write_cast(node, step, mode, known)
                known[step.cast] = self.casts[step.cast]
        self.env[node] = steps.argument(recorded.result)

    def _switch(self, step: Step, mode: Mode) -> None:
        """Switches to the mode of a step: autocast records gradients of casts that it caches, in any mode."""
        bare = _without_autocast(mode)
        recorded = records_gradients(mode.within(self.program.caller))
        self.modes.switch(bare if step.grad == recorded else replace(bare, grad=step.grad))

    def _known(self, node: Node, places: Places, steps: Iterable[Step], result: Any = None) -> dict[Label, Any]:
        """The values in the new graph for the labels that these steps read, and for those in the result."""
        inputs = [self.env[read] for read in nodes_read(node)]
        needed = [*labels_in([(step.args, dict(step.kwargs)) for step in steps]), *labels_in(result)]
        known = {}
        for label in dict.fromkeys(label for label in needed if label in places):
            place = places[label][0]
            value = inputs[place.number]
            if place.item is not None:
                value = self._item(node, value, place)
            known[label] = value
        return known

    def _item(self, node: Node, container: Any, place: Place) -> Any:
        if not isinstance(container, Node) or place.item is None:
            return container[place.item]
        value = value_read(self.program, nodes_read(node)[place.number])[place.item]
        return write_beside(self.writer, node, operator.getitem, (container, place.item), value=value)

    def _names(self, node: Node, result: Any, known: dict[Label, Any]) -> dict[Label, str]:
        """The names that results keep: that of the node, or those of its getitem nodes."""
        if isinstance(result, Label):
            return {} if result in known else {result: node.name}
        names = {}
        for user in node.users:
            if user.target is operator.getitem and user.args[0] is node and isinstance(user.args[1], int):
                item = result[user.args[1]] if isinstance(result, tuple | list) else None
                if isinstance(item, Label) and item not in known and item not in names:
                    names[item] = user.name
        return names


#: Operators whose kernels call others that autocast casts (torch 2.13); fake tensors do not reach the kernel.
_ONEDNN_KERNELS = (torch.lstm, torch.ops.aten.lstm.input, torch.ops.aten.lstm.data)
_CAST_IN_KERNEL = (
    torch.bilinear,
    torch.nn.functional.bilinear,
    torch.ops.aten.bilinear.default,
    torch.ops.aten._trilinear.default,
)


def _computes(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not (
        node.op == "call_function" and is_higher_order(node.target)
    )


def _erase_unused_attributes(graph: Graph, program: Program) -> None:
    """Removes attributes that have become unused, since only earlier casts of them are read."""
    were_unused = {node.name for node in program.graph.find_nodes(op="get_attr") if not node.users}
    for node in graph.find_nodes(op="get_attr"):
        if not node.users and node.name not in were_unused:
            graph.erase_node(node)


def _without_autocast(mode: Mode) -> Mode:
    blocks = tuple(block for block in mode.blocks if isinstance(block.sets, Inference))
    return replace(mode, autocast=(), blocks=blocks)


class SizeWriter:
    """Writes symbolic sizes as nodes; `env` maps the nodes of the program to those of the new graph."""

    def __init__(self, program: Program, writer: GraphWriter, env: Mapping[Node, Any]) -> None:
        self._program, self._writer, self._env = program, writer, env
        self._symbols = Symbols(program.index)
        self._read: dict[Any, Node] = {}

    def size(self, size: torch.SymInt, node: Node) -> Node | int:
        """A node that computes `size`, which an operator in place of `node` needs."""
        written = write_number(size, self._sources(node))
        if written is None:
            raise ModeError(
                f"node {node.name!r} needs the size {size} under autocast, which no input of the graph has; trace the "
                "program with sizes that are inputs"
            )
        if isinstance(written, Node):
            written.meta["val"] = size
        return written

    def _sources(self, node: Node) -> dict[Any, Node]:
        """The nodes that compute the symbols in the values of `node` and of its inputs."""
        index = self._program.index
        number = index.number[node]
        for near in (*index.inputs(number), number):
            for place, symbol in self._symbols.sources(near):
                # The result of the node itself is not there yet.
                if symbol not in self._read and (place.number if isinstance(place, Dimension) else place) != number:
                    self._read[symbol] = self._node(place, node)
        return self._read

    def _node(self, place: int | Dimension, reader: Node) -> Node:
        nodes = self._program.index.nodes
        if not isinstance(place, Dimension):
            return self._env[nodes[place]]  # type: ignore[no-any-return]
        source, axis = nodes[place.number], place.axis
        value = value_of(source).shape[axis]
        return write_beside(self._writer, reader, SYM_SIZE, (self._env[source], axis), value=value)


class StepWriter:
    """Writes recorded operators in place of `node`; `known` maps labels to nodes, and grows as it writes."""

    def __init__(
        self,
        node: Node,
        writer: GraphWriter,
        sandbox: FakeSandbox,
        known: dict[Label, Node],
        size: Callable[[torch.SymInt], Any],
    ) -> None:
        self.node, self.writer, self.sandbox, self.known, self.size = node, writer, sandbox, known, size

    def write(self, step: Step, names: Mapping[Label, str]) -> None:
        """Writes one step; its results get these names."""
        args, kwargs = self.argument(step.args), self.argument(dict(step.kwargs))
        value = self._value(step)
        if isinstance(step.result, Label):
            self.known[step.result] = self._node(step.target, args, kwargs, value, names.get(step.result))
        else:
            self._unpack(self._node(step.target, args, kwargs, value), step.result, value, names)

    def argument(self, argument: Any) -> Any:
        """An argument of a step, with nodes in place of labels and of dynamic sizes."""
        return map_leaves(self._leaf, argument)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Label) and leaf not in self.known:
            raise ModeError(
                f"node {self.node.name!r} reads a tensor under autocast that is not among its arguments; pass the "
                "function that it calls all its tensors as arguments"
            )
        if isinstance(leaf, Label):
            return self.known[leaf]
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            raise ModeError(
                f"node {self.node.name!r} reads the number {leaf} from a tensor that autocast casts for it; switch "
                "autocast off around it"
            )
        return self.size(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _unpack(self, container: Node, items: Any, values: Any, names: Mapping[Label, str]) -> None:
        if next(labels_in(items), None) is None:
            return
        for place, (item, value) in enumerate(zip(items, values, strict=True)):
            name = names.get(item) if isinstance(item, Label) else None
            taken = self._node(operator.getitem, (container, place), {}, value, name)
            if isinstance(item, Label):
                self.known[item] = taken
            else:
                self._unpack(taken, item, value, names)

    def _node(self, target: Any, args: Any, kwargs: Any, value: Any, name: str | None = None) -> Node:
        return write_beside(self.writer, self.node, target, args, kwargs, value=value, name=name)

    def _value(self, step: Step) -> Any:
        looks: list[TensorMetadata] = list(step.metadata[::-1])
        return map_leaves(lambda leaf: self.sandbox.made(looks.pop()) if isinstance(leaf, Label) else leaf, step.result)
