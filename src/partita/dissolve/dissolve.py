"""Dissolves modes: a program of plain operators that means the same, without toggles and mode operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.gc_pause import gc_paused
from partita._torch.operators.schemas import is_higher_order
from partita.analysis.mode import Mode
from partita.analysis.nodes import find
from partita.dissolve.autocast import dissolve_autocast
from partita.dissolve.grad import dissolve_grad, records_gradients
from partita.errors import ModeError
from partita.program.program import Program
from partita.rewrite.inline import inline
from partita.rewrite.mode_nodes import ModeWriter, setting_of
from partita.rewrite.state import module_like, place, share_state, unique_names


@gc_paused()
def dissolve(program: Program | GraphModule | ExportedProgram) -> Program:
    """A program that means the same by operators alone: casts for autocast, `detach` for no_grad and inference mode.

    Each node that runs under autocast is run once on fake tensors, to find what autocast casts; this needs the
    traced values that `partita.capture`, torch.export and make_fx leave on nodes. A program that switches no modes
    is returned as it is.

    The caller is taken to record gradients, and to have no autocast on: `enable_grad` in the program has no counterpart
    among operators, so called under no_grad the program records none. Inputs that require gradients are taken to be
    leaves, whose casts autocast keeps within a block. Tensors created in inference mode are plain tensors
    afterwards. A view that is made under no_grad of a tensor with gradients reports `requires_grad`, although no
    gradient ever arrives; here it does not.
    """
    return _dissolved(Program.of(program))


def _dissolved(program: Program) -> Program:
    caller = program.caller
    is_called_plainly = records_gradients(caller) and not any(autocast.enabled for autocast in caller.autocast)
    if is_called_plainly and not _has_modes(program):
        return program
    flat = inline(program)
    _check_closed(flat)
    flat = dissolve_bodies(flat, _dissolved)
    return dissolve_grad(dissolve_autocast(flat))


def _has_modes(program: Program) -> bool:
    """Whether the graph, or any body that it calls, switches a mode."""
    if program.modes.by_number is not None:
        return True
    if any(setting_of(node) is not None for node in program.index.nodes):
        return True
    named = (node for node in program.index.nodes if node.op in ("get_attr", "call_module"))
    bodies = (find(program.graph_module, str(node.target)) for node in named)
    return any(_has_modes(Program.of(body)) for body in bodies if isinstance(body, GraphModule))


def _check_closed(program: Program) -> None:
    final = program.modes.final
    if final.grad is False or final.inference is not None or final.autocast:
        raise ModeError(
            f"the program leaves {final} behind for its caller, which no plain operator can do; close its blocks"
        )


def dissolve_bodies(program: Program, dissolved: Callable[[Program], Program]) -> Program:
    """A flat program whose operators run bodies without modes of their own; the same object if they do already.

    A body that is run under several modes becomes one body for each.
    """
    bodies = _bodies(program, dissolved)
    return _BodyReplacement(program, bodies).replaced() if bodies else program


def _bodies(program: Program, dissolved: Callable[[Program], Program]) -> dict[tuple[Node, Node], GraphModule]:
    """The new body of each operator, by the node that reads the old one, where it changes."""
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


class _BodyReplacement:
    """Writes a copy of the graph that runs other bodies."""

    def __init__(self, program: Program, bodies: dict[tuple[Node, Node], GraphModule]) -> None:
        self.program, self.bodies = program, bodies
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.paths = self._places()

    def replaced(self) -> Program:
        program, modes = self.program, self.program.modes
        self.writer.names.reserve(node.name for node in program.index.nodes)
        switching = ModeWriter(self.writer)
        env: dict[Node, Any] = dict.fromkeys(modes.read)
        for number, node in enumerate(program.index.nodes):
            if number in modes.toggles or self._is_gone(node):
                continue
            if node.op != "get_attr":
                switching.switch(modes.final if node.op == "output" else modes.at(number))
            inputs = {read: self._replaced(node, read, env) for read in node.all_input_nodes}
            env[node] = self.writer.copy(node, inputs.__getitem__, name=node.name)
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
        """Whether all users of `node` read a new body instead."""
        return node.op == "get_attr" and bool(node.users) and all((user, node) in self.bodies for user in node.users)

    def _replaced(self, node: Node, read: Node, env: dict[Node, Any]) -> Any:
        body = self.bodies.get((node, read))
        if body is None:
            return env[read]
        made = self.writer.write("get_attr", self.paths[body], name=self.writer.names.fresh(read.name))
        self.writer.copy_meta(read, made)
        return made
