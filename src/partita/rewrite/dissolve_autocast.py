"""Autocast as the casts that it performs: a program that means the same and has no autocast block."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from partita._torch.nodes import GraphWriter
from partita._torch.schemas import is_higher_order
from partita._torch.stage import Look, Stage, tensors_in
from partita._torch.watching import Label, Step, labels_in
from partita.errors import ModeError
from partita.graphs.mode import Inference, Mode
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.rewrite.assembly import module_like
from partita.rewrite.autocast_findings import AsItIs, OnCasts, Place, Places, TakenApart
from partita.rewrite.autocast_rehearsal import Rehearsal, check_value
from partita.rewrite.gradient_carriers import records_gradients
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.size_writer import SizeWriter
from partita.rewrite.state import share_state
from partita.rewrite.step_writer import StepWriter
from partita.rewrite.traced_values import nodes_read, stage_of, value_read, write_beside

__all__ = ["dissolve_autocast"]

_TO = torch.ops.aten.to.dtype


def dissolve_autocast(program: Program) -> Program:
    """A flat program without autocast blocks; the same object if none of its nodes runs in one."""
    modes, caller = program.modes, program.caller
    if not caller.autocast and not any(mode.autocast or mode.blocks for mode in modes.by_number or ()):
        return program
    stage = stage_of(program)
    with stage.opened(), closing(Rehearsal(program, stage)) as rehearsal:
        return _Caster(program, stage, rehearsal).dissolved()


class _Caster:
    """The new graph while it is written."""

    def __init__(self, program: Program, stage: Stage, rehearsal: Rehearsal) -> None:
        self.program, self.stage, self.rehearsal = program, stage, rehearsal
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        #: The casts that were written: autocast may have kept them for later.
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
        _erase_idle_attributes(graph, program)
        module = module_like(program.graph_module, graph, restores_modes=self.modes.has_switched)
        share_state(program.graph_module, module, without=frozenset())
        return program.rewritten(module)

    def _write(self, node: Node, mode: Mode) -> None:
        if node.target in _CASTS_UNSEEN and any(autocast.enabled for autocast in mode.autocast):
            raise ModeError(
                f"node {node.name!r} calls {node.target}, inside of which autocast casts where nobody can see it; "
                "write it as matrix products in the model, or switch autocast off around it"
            )
        within = mode.within(self.program.caller).autocast
        on_cpu = next((autocast for autocast in within if autocast.enabled and autocast.device == "cpu"), None)
        if node.target in _KERNELS_OF_ONE_MACHINE and on_cpu is not None:
            self._write_on_casts(node, mode, on_cpu.dtype or torch.get_autocast_dtype("cpu"))
            return
        found = self.rehearsal.of(node, mode)
        if isinstance(found, AsItIs):
            self._copy(node, mode)
        elif isinstance(found, OnCasts):
            known = self._known(node, found.places, found.casts)
            for step in found.casts:
                self._write_cast(node, step, mode, known)
            self._copy(node, mode, {place: self.casts[label] for place, label in found.by_place.items()})
        else:
            self._write_steps(node, found, mode)

    def _write_on_casts(self, node: Node, mode: Mode, dtype: torch.dtype) -> None:
        """The node on casts of all its tensors.

        What torch makes of it here is one kernel of oneDNN, which other machines do not have, or not for this dtype.
        """
        check_value(node, [dtype] * len(tensors_in(value_of(node))))
        self.modes.switch(_without_autocast(mode))
        by_place = {}
        for place, read in enumerate(nodes_read(node)):
            value = value_read(self.program, read)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype:
                cast = self.stage.made(Look.of(value)._replace(dtype=dtype))
                by_place[place] = write_beside(self.writer, node, _TO, (self.env[read], dtype), value=cast)
        self._copy(node, mode, by_place)

    def _copy(self, node: Node, mode: Mode, by_place: dict[int, Node] | None = None) -> None:
        if node.op != "get_attr":
            self.modes.switch(_without_autocast(mode))
        place = -1

        def swap(read: Node) -> Any:
            nonlocal place
            place += 1
            return by_place[place] if by_place and place in by_place else self.env[read]

        self.env[node] = self.writer.copy(node, swap, name=node.name)

    def _write_cast(self, node: Node, step: Step, mode: Mode, known: dict[Label, Any]) -> None:
        label = step.cast
        assert label is not None
        assert label.cast_of is not None
        self._switch(step, mode)
        (look,) = step.looks
        value = self.stage.made(look)
        self.casts[label] = write_beside(self.writer, node, _TO, (known[label.cast_of], look.dtype), value=value)

    def _write_steps(self, node: Node, found: TakenApart, mode: Mode) -> None:
        performance = found.performance
        known = self._known(node, found.places, performance.steps, performance.result) | self.casts
        steps = StepWriter(node, self.writer, self.stage, known, lambda size: self.sizes.size(size, node))
        names = self._names(node, performance.result, known)
        # An operator that writes in place gives a tensor that an earlier step made: the last one has the name.
        last = {label: step for step in performance.steps for label in labels_in(step.result)}
        for step in performance.steps:
            if step.cast is None:
                self._switch(step, mode)
                steps.write(step, {label: name for label, name in names.items() if last[label] is step})
            else:
                self._write_cast(node, step, mode, known)
                known[step.cast] = self.casts[step.cast]
        self.env[node] = steps.argument(performance.result)

    def _switch(self, step: Step, mode: Mode) -> None:
        """Switches to the mode of a step: autocast records gradients of casts that it keeps, whatever the mode."""
        bare = _without_autocast(mode)
        recorded = records_gradients(mode.within(self.program.caller))
        self.modes.switch(bare if step.grad == recorded else replace(bare, grad=step.grad))

    def _known(self, node: Node, places: Places, steps: Iterable[Step], result: Any = None) -> dict[Label, Any]:
        """What stands in the new graph for the labels that these steps read, and that the result has."""
        given = [self.env[read] for read in nodes_read(node)]
        needed = [*labels_in([(step.args, dict(step.kwargs)) for step in steps]), *labels_in(result)]
        known = {}
        for label in dict.fromkeys(label for label in needed if label in places):
            place = places[label][0]
            value = given[place.number]
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
        """The names that results keep: that of the node, or those of the nodes that take it apart."""
        if isinstance(result, Label):
            return {} if result in known else {result: node.name}
        names = {}
        for user in node.users:
            if user.target is operator.getitem and user.args[0] is node and isinstance(user.args[1], int):
                item = result[user.args[1]] if isinstance(result, tuple | list) else None
                if isinstance(item, Label) and item not in known and item not in names:
                    names[item] = user.name
        return names


#: Kernels that call operators which autocast casts (torch 2.13); fake tensors never get that far.
_KERNELS_OF_ONE_MACHINE = (torch.lstm, torch.ops.aten.lstm.input, torch.ops.aten.lstm.data)
_CASTS_UNSEEN = (
    torch.bilinear,
    torch.nn.functional.bilinear,
    torch.ops.aten.bilinear.default,
    torch.ops.aten._trilinear.default,
)


def _computes(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not (
        node.op == "call_function" and is_higher_order(node.target)
    )


def _erase_idle_attributes(graph: Graph, program: Program) -> None:
    """Takes out attributes that are only read through casts which are written elsewhere."""
    idle = {node.name for node in program.graph.find_nodes(op="get_attr") if not node.users}
    for node in graph.find_nodes(op="get_attr"):
        if not node.users and node.name not in idle:
            graph.erase_node(node)


def _without_autocast(mode: Mode) -> Mode:
    blocks = tuple(block for block in mode.blocks if isinstance(block.sets, Inference))
    return replace(mode, autocast=(), blocks=blocks)
