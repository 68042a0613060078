"""Dissolves modes: a program of plain operators that means the same, without toggles and mode operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Graph, GraphModule, Node

from partita._torch.dry_runs import refusal_of_device
from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.fx.lazy_graph_module import generate_code
from partita._torch.gc_pause import gc_paused
from partita._torch.modes import fresh_modes
from partita._torch.nn_modules import StandsForBody
from partita._torch.operator_schemas import is_higher_order, mutated_nodes, storage_key, viewed_node
from partita.analysis.modes import Mode
from partita.analysis.nodes import bodies_read, find, value_of
from partita.dissolve.autocast import dissolve_autocast
from partita.dissolve.grad import dissolve_grad, records_gradients
from partita.errors import ModeError, OptionError, SignatureError
from partita.program._torch.guards import guards_of, set_guards
from partita.program.exported import ExportRecord
from partita.program.program import Program
from partita.rewrite.inline import inline
from partita.rewrite.mode_nodes import ModeWriter, setting_of
from partita.rewrite.operator_calls import calling_modules
from partita.rewrite.state import module_like, place, share_state, unique_names
from partita.rewrite.wrap_modes import wrap_modes


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
        for read, body in bodies_read(program.graph_module, node.all_input_nodes):
            if (body, mode) not in known:
                known[body, mode] = dissolved(Program(body, pure=program.pure, caller=mode)).graph_module
            if known[body, mode] is not body:
                found[node, read] = known[body, mode]
    return found


class _BodyReplacement:
    """Writes a copy of the graph that runs other bodies."""

    def __init__(self, program: Program, bodies: dict[tuple[Node, Node], GraphModule]) -> None:
        self.program, self.bodies = program, bodies
        self.writer = GraphWriter.like(program.graph)
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
                switching.end_in(modes.final) if node.op == "output" else switching.switch(modes.at(number))
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


# Exported programs: modes become operators, or are dissolved before a decomposition.


def exported_program(program: Program) -> ExportedProgram:
    """The program as an ExportedProgram, which cannot hold toggles: these become operators."""
    return _record(program).around(wrap_modes(program).graph_module)


def exported_module(program: Program) -> GraphModule:
    """The module of an exported program, which can be pickled and copied, and checks its inputs."""
    module = calling_modules(program, {}).graph_module
    generate_code((module,))  # torch.export reads the signature of `forward`.
    return module


def decomposed_program(
    program: Program, table: dict[Any, Callable[..., Any]] | None, *, decompose_custom_triton_ops: bool
) -> ExportedProgram:
    """The decomposed program, with `detach` wherever gradients must not flow.

    torch runs the body of a mode operator as it is and forgets the mode: afterwards a weight that no_grad had frozen
    gets gradients (torch 2.13). So the modes are dissolved first, into casts and `detach`.
    """
    guards = _record(program).guards
    why = refusal_of_device([value_of(node) for node in program.graph.nodes])
    if why is not None:
        raise OptionError(f"the program cannot be decomposed here, since {why}; decompose it where it was exported")
    table = default_decompositions() if table is None else dict(table)
    # The table turns it into an alias, through which gradients flow.
    table.pop(torch.ops.aten.detach.default, None)
    run_decompositions = ExportedProgram.run_decompositions
    with fresh_modes(grad=True):  # Under autocast, torch would write the casts of this moment into the program.
        plain = dissolve(program)
        _check_mutations(plain.graph)
        try:
            decomposed: ExportedProgram = run_decompositions(plain.exported(), table, decompose_custom_triton_ops)
        except (AssertionError, RuntimeError) as error:
            _explain(error, plain)
            raise
        # torch collects guards while it traces, and so loses those of a program that was loaded.
        set_guards(decomposed, dict.fromkeys((*guards, *guards_of(decomposed))))
        # It keeps its meaning when it is decomposed again, as some backends do.
        return ExportRecord.of(decomposed).around(decomposed.graph_module)


def _record(program: Program) -> ExportRecord:
    if program.export is None and any(isinstance(module, StandsForBody) for module in program.graph_module.children()):
        raise OptionError(
            "this program has lowered regions, which an exported program cannot hold; use Delegate in place of Lower, "
            "whose stored functions an exported program holds, pickle the module(), or export the program that was "
            "planned"
        )
    if program.export is None:
        raise OptionError(
            "this program was made from a graph module, which has no signature to export it by; make it from an "
            "exported program, for example with partita.capture(model, args)"
        )
    return program.export


def _explain(error: Exception, program: Program) -> None:
    """Raises an error that says why torch could not decompose a program whose inputs share memory and are mutated."""
    specs, mutated = _record(program).signature.input_specs, set[int]()
    held: dict[int, list[str]] = {}
    for node, spec in zip(program.graph.find_nodes(op="placeholder"), specs, strict=True):
        value = value_of(node)
        if isinstance(value, Tensor):
            held.setdefault(storage_key(value), []).append(repr(spec.target or node.name))
            if program.index.number[node] in program.effects.mutated_inputs:
                mutated.add(storage_key(value))
    shared = max((held[memory] for memory in mutated), key=len, default=[])
    if len(shared) > 1:
        raise SignatureError(
            f"torch {torch.__version__} cannot decompose a program that mutates inputs of which some share memory: "
            f"{', '.join(shared[:5])}. Hold a tensor under one name, and capture the model with arguments that "
            "share no memory"
        ) from error


def _check_mutations(graph: Graph) -> None:
    """Raises where a mutation goes through `detach`: functionalized, it would detach the mutated tensor as well."""
    for node in graph.nodes:
        for written in mutated_nodes(node):
            seen: Node | None = written
            while seen is not None and seen.target is not torch.ops.aten.detach.default:
                seen = viewed_node(seen)
            if seen is not None:
                raise ModeError(
                    f"node {node.name!r} mutates a tensor that gradients flow through, under no_grad or through "
                    "detach; a decomposed program cannot keep that. Train the program as it is, or decompose it for "
                    "inference alone with torch.export.ExportedProgram.run_decompositions(program.exported())"
                )
