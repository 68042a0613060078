"""Dissolving inside operators: the bodies that a program runs, for the modes that it runs them under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from partita._torch.nodes import GraphWriter
from partita._torch.schemas import is_higher_order
from partita.graphs.attributes import find
from partita.graphs.mode import Mode
from partita.graphs.program import Program
from partita.rewrite.assembly import module_like
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import place, share_state
from partita.rewrite.unique_names import unique_names

__all__ = ["dissolve_bodies"]


def dissolve_bodies(program: Program, dissolved: Callable[[Program], Program]) -> Program:
    """A flat program whose operators run bodies without modes of their own; the same object if they do already.

    A body that is run under several modes becomes one body for each.
    """
    bodies = _bodies(program, dissolved)
    return _Swapping(program, bodies).swapped() if bodies else program


def _bodies(program: Program, dissolved: Callable[[Program], Program]) -> dict[tuple[Node, Node], GraphModule]:
    """What each operator is to run in place of each body that it reads, where that changes."""
    known: dict[tuple[GraphModule, Mode], GraphModule] = {}
    found = {}
    for number, node in enumerate(program.index.nodes):
        if node.op != "call_function" or not is_higher_order(node.target):
            continue
        mode = replace(program.modes.at(number).within(program.caller), blocks=())
        for read in node.all_input_nodes:
            body = find(program.graph_module, str(read.target)) if read.op == "get_attr" else None
            if not isinstance(body, GraphModule):
                continue
            if (body, mode) not in known:
                known[body, mode] = dissolved(Program(body, pure=program.pure, caller=mode)).graph_module
            if known[body, mode] is not body:
                found[node, read] = known[body, mode]
    return found


class _Swapping:
    """A copy of the graph with other bodies in it."""

    def __init__(self, program: Program, bodies: dict[tuple[Node, Node], GraphModule]) -> None:
        self.program, self.bodies = program, bodies
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.paths = self._places()

    def swapped(self) -> Program:
        program, modes = self.program, self.program.modes
        self.writer.names.reserve(node.name for node in program.index.nodes)
        switching = ModeWriter(self.writer)
        env: dict[Node, Any] = dict.fromkeys(modes.read)
        for number, node in enumerate(program.index.nodes):
            if number in modes.toggles or self._is_gone(node):
                continue
            if node.op != "get_attr":
                switching.switch(modes.final if node.op == "output" else modes.at(number))
            swap = {read: self._swapped(node, read, env) for read in node.all_input_nodes}
            env[node] = self.writer.copy(node, swap.__getitem__, name=node.name)
        graph = self.writer.close()
        switching.close()
        module = module_like(program.graph_module, graph, restores_modes=switching.has_switched)
        gone = {str(read.target) for _, read in self.bodies if self._is_gone(read)}
        share_state(program.graph_module, module, without=frozenset(gone), room_for=self.paths.values())
        for body, path in self.paths.items():
            place(module, path, body)
        return program.rewritten(module)

    def _places(self) -> dict[GraphModule, str]:
        """A path for each new body: that of the body whose place it takes, or a new one beside it."""
        old = [str(read.target) for _, read in self.bodies]
        new = unique_names([path.replace(".", "_") for path in old], self.program.graph_module)
        paths: dict[GraphModule, str] = {}
        for ((_, read), body), free in zip(self.bodies.items(), new, strict=True):
            path = str(read.target)
            is_free = self._is_gone(read) and path not in paths.values() and old.count(path) == 1
            paths.setdefault(body, path if is_free else free)
        return paths

    def _is_gone(self, node: Node) -> bool:
        """Whether everybody reads something else in the place of `node`."""
        return node.op == "get_attr" and bool(node.users) and all((user, node) in self.bodies for user in node.users)

    def _swapped(self, node: Node, read: Node, env: dict[Node, Any]) -> Any:
        body = self.bodies.get((node, read))
        if body is None:
            return env[read]
        made = self.writer.write("get_attr", self.paths[body], name=self.writer.names.fresh(read.name))
        self.writer.copy_meta(read, made)
        return made
