"""no_grad and inference mode as `detach`: a program that means the same and switches neither."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.nodes import GraphWriter
from partita._torch.stage import Stage, map_tensors, tensors_in
from partita._torch.toggles import IS_GRAD_ENABLED
from partita.errors import OptionError
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.rewrite.assembly import module_like
from partita.rewrite.gradient_carriers import detaches, gradient_carriers, records_gradients
from partita.rewrite.returned_arguments import ReturnedArguments
from partita.rewrite.state import share_state
from partita.rewrite.traced_values import can_carry_gradients, has_value, stage_of, value_read, write_beside

__all__ = ["dissolve_grad"]

_DETACH = torch.ops.aten.detach.default


def dissolve_grad(program: Program) -> Program:
    """A flat program without grad and inference toggles; the same object if no node of it runs under one.

    `program` must be free of autocast.
    """
    if program.modes.by_number is None and records_gradients(program.caller):
        return program
    stage = stage_of(program)
    with stage.opened():
        return _Detacher(program, stage).dissolved()


class _Detacher:
    """The new graph while it is written."""

    def __init__(self, program: Program, stage: Stage) -> None:
        self.program, self.stage = program, stage
        self.returned = ReturnedArguments(program, stage)
        self.carriers = gradient_carriers(program, self.returned)
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        self.detached: dict[Node, Any] = {}
        #: What a container holds that is one of the arguments of whoever made it.
        self.items: dict[Node, dict[int | None, Node]] = {}

    def dissolved(self) -> Program:
        program, modes = self.program, self.program.modes
        self.writer.names.reserve(node.name for node in program.index.nodes)
        projections = frozenset(program.projections)
        for number, node in enumerate(program.index.nodes):
            if number in modes.toggles:
                continue
            mode = modes.at(number).within(program.caller)
            if number in projections:
                self._take_item(node)
            elif node.target is IS_GRAD_ENABLED and (mode.grad is not None or mode.inference):
                self.env[node] = records_gradients(mode)
            elif node.op in ("placeholder", "get_attr", "output") or records_gradients(mode):
                self._copy(node)
                for written in self.returned.written_by(node):
                    self.detached.pop(written, None)
            else:
                self._write_without_gradients(node)
        module = module_like(program.graph_module, self.writer.close())
        share_state(program.graph_module, module, without=frozenset())
        return program.rewritten(module)

    def _write_without_gradients(self, node: Node) -> None:
        if node.op == "call_module":
            raise OptionError(
                f"node {node.name!r} calls the module {node.target!r} where no gradients are recorded, and its "
                "parameters are out of reach there; trace the model into operators, for example with "
                "partita.capture(model, args)"
            )
        written = self.returned.written_by(node) & self.carriers
        if detaches(node) or not (written or self._gives_numbers(node)):
            self._copy(node)
            return
        if written:
            self.returned.check_writing(node)
        same = {item: source for item, source in self.returned.of(node).items() if source in self.carriers}
        # What a node writes, it writes through a detached alias; what it just returns, it returns with its history.
        kept = set(same.values()) - written
        detached = {read for read in node.all_input_nodes if read in self.carriers and read not in kept}
        self._copy(node, without_gradients=detached)
        self.items[node] = {item: source for item, source in same.items() if source in written}
        if None in self.items[node]:
            self.env[node] = self.env[same[None]]

    def _gives_numbers(self, node: Node) -> bool:
        """Whether a result of `node` could carry gradients."""
        return not has_value(node) or any(map(can_carry_gradients, tensors_in(value_of(node))))

    def _take_item(self, node: Node) -> None:
        container, place = node.args
        source = self.items.get(container, {}).get(place)  # type: ignore[arg-type]
        if source is not None:
            self.env[node] = self.env[source]
        else:
            self._copy(node)

    def _copy(self, node: Node, *, without_gradients: Collection[Node] = ()) -> None:
        for read in node.all_input_nodes:
            if read in without_gradients and read not in self.detached:
                self.detached[read] = self._detach(read, node)
        swap = {
            read: self.detached[read] if read in without_gradients else self.env[read] for read in node.all_input_nodes
        }
        self.env[node] = self.writer.copy(node, swap.__getitem__, name=node.name)

    def _detach(self, source: Node, reader: Node) -> Any:
        """A node that gives what `source` gives, without gradients and in the same storage."""
        value = value_read(self.program, source)
        if isinstance(value, tuple | list):
            items = range(len(value))
            taken = [self._item(self.env[source], place, value[place], reader) for place in items]
            return [self._detach_node(node, reader, value[place]) for place, node in zip(items, taken, strict=True)]
        return self._detach_node(self.env[source], reader, value)

    def _item(self, container: Any, place: int, value: Any, reader: Node) -> Any:
        if not isinstance(container, Node):
            return container[place]
        return write_beside(self.writer, reader, operator.getitem, (container, place), value=value)

    def _detach_node(self, node: Any, reader: Node, value: Any) -> Any:
        if not isinstance(value, Tensor) or not can_carry_gradients(value):
            return node
        return write_beside(self.writer, reader, _DETACH, (node,), value=map_tensors(self.stage.alias, value))
