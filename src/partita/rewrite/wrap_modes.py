"""Wrapping modes: every run of nodes under one setting becomes a call of the higher-order operator that sets it.

Nested settings become nested calls, in the bodies and in the bodies of other operators too. Modes that a program leaves
switched for its caller are not kept: an operator restores the modes that it found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch.fx import GraphModule, Node

from partita._torch.gc_pause import gc_paused
from partita.analysis.modes import AMBIENT, EVERY_SETTING, Autocast, Grad, Inference, Mode, has_toggles, identifier_of
from partita.analysis.nodes import find
from partita.program.mode_runs import ModeRun, mode_runs, nested_mode_runs, openers_of
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.rewrite.mode_nodes import OperatorFamily, operator_for, setting_of
from partita.rewrite.operator_calls import call_through
from partita.rewrite.outline import EXPORT_STYLE, CallModes, outlined, with_bodies
from partita.rewrite.state import MovedByPart, unique_names

#: Nests of more blocks than that are cut in half.
_DEEP = 16


@dataclass(frozen=True, slots=True)
class WrapStyle:
    """Whose operators are written, for which kinds of settings, and how bodies and calls are named."""

    operators: OperatorFamily = "partita"
    kinds: Collection[type] = EVERY_SETTING
    #: Names for the bodies, numbered where they are taken; by default after the setting.
    names: Callable[[Program, Sequence[ModeRun]], Sequence[str]] | None = None
    named_by_operator: bool = False
    #: Bodies get the symbols in the shapes of their inputs, too.
    passes_symbols: bool = True
    #: Graphs that are called as modules are wrapped inside, too.
    in_modules: bool = False


@gc_paused()
def wrap_modes(program: Program, style: WrapStyle | None = None) -> Program:
    """A new program that sets modes by operators; the same object if it switches none and calls no body that does."""
    return _Wrapper(style or WrapStyle()).wrapped(program)


class _Wrapper:
    """The state that all levels share."""

    def __init__(self, style: WrapStyle) -> None:
        self.style, self.kinds = style, style.kinds
        #: Bodies that are already wrapped inside.
        self.finished: set[GraphModule] = set()
        self.is_deep = False

    def wrapped(self, program: Program) -> Program:
        # Every cut copies the nodes that it outlines, so a deep nest is cut in half first: outermost first, the
        # innermost nodes would be copied once for every block around them.
        while runs := nested_mode_runs(program, self.kinds, deeper_than=_DEEP):
            self.is_deep = True
            program = self._with_calls(program, runs)
        if has_toggles(program.graph, self.kinds):
            program = self._with_calls(program, mode_runs(program, self.kinds))
        return self._with_wrapped_bodies(program)

    def _with_calls(self, program: Program, runs: Sequence[ModeRun]) -> Program:
        """`program` with a call for each of these runs, none of which is inside another."""
        nodes = program.index.nodes
        wanted = self.style.names(program, runs) if self.style.names else [identifier_of(run.sets) for run in runs]
        names = unique_names(wanted, program.graph_module)
        regions = [
            Region(name, tuple(nodes[number] for number in run.numbers), str(run.sets))
            for name, run in zip(names, runs, strict=True)
        ]
        call_modes = CallModes(
            [run.around for run in runs], [run.inside for run in runs], self._left_behind(program.modes.final)
        )
        passes_symbols = self.style.passes_symbols
        # Bodies may become part of an exported program, so scalars cross only where the style follows torch's passes.
        partition = Partition(program, regions, passes_symbols=passes_symbols, passes_scalars=not passes_symbols)
        cut = outlined(partition, names=names, style=EXPORT_STYLE, call_modes=call_modes)
        module, moved = cut.graph_module, MovedByPart(cut.moved)
        for name, body, run in zip(cut.names, cut.bodies, runs, strict=True):
            caller = _without_blocks(run.inside).within(_without_blocks(program.caller))
            inside = self.wrapped(program.body(body, caller)).graph_module
            self.finished.add(inside)
            if self.is_deep:  # Innermost first, deep nests need no deep recursion.
                program.calls.of_module(inside)
            module._modules[name] = inside
            moved.settle(name, body, inside)
        operators = (operator_for(run.sets, self.style.operators) for run in runs)
        calls = dict(zip(cut.names, operators, strict=True))
        openers = dict(zip(cut.names, openers_of(program, runs), strict=True))
        call_through(module, calls, openers=openers, named_by_operator=self.style.named_by_operator)
        keys = program.state_keys.then(moved.settled)
        return program.rewritten(module, state_keys=keys, tolerance=cut.tolerance, knows_bodies=True)

    def _left_behind(self, final: Mode) -> Mode:
        """The final mode that the remaining toggles set."""
        blocks = tuple(block for block in final.blocks if type(block.sets) not in self.kinds)
        if Grad in self.kinds:
            blocks = tuple(replace(block, grad=None) for block in blocks)
        return Mode(
            None if Grad in self.kinds else final.grad,
            None if Inference in self.kinds else final.inference,
            () if Autocast in self.kinds else final.autocast,
            blocks,
        )

    def _with_wrapped_bodies(self, program: Program) -> Program:
        """`program` with the bodies of its operators wrapped inside, where they are not yet."""
        calls: dict[str, list[Node]] = {}
        for node in program.graph.find_nodes(op="get_attr"):
            calls.setdefault(str(node.target), []).extend(node.users)
        for node in program.graph.find_nodes(op="call_module") if self.style.in_modules else ():
            calls.setdefault(str(node.target), []).append(node)
        changed: dict[str, GraphModule] = {}
        # Calls that share a body share the wrapped one, too, if they run it in the same modes.
        known: dict[tuple[GraphModule, Mode], GraphModule | None] = {}
        for path, nodes in calls.items():
            body = find(program.graph_module, path)
            if isinstance(body, GraphModule) and body not in self.finished:
                caller = _caller_of_body(program, nodes)
                if (body, caller) not in known:
                    inner = program.body(body, caller)
                    wrapped = self.wrapped(inner)
                    known[body, caller] = wrapped.graph_module if wrapped is not inner else None
                made = known[body, caller]
                if made is not None:
                    changed[path] = made
        return with_bodies(program, changed) if changed else program


def _caller_of_body(program: Program, calls: Sequence[Node]) -> Mode:
    """The known modes that a body runs under: what all calls of it have in common."""
    modes = []
    for call in calls:
        mode, setting = program.modes.at(program.index.number[call]), setting_of(call)
        mode = _without_blocks(mode if setting is None else mode.setting(setting))
        modes.append(mode.within(program.caller))
    return reduce(_in_common, modes, modes[0]) if modes else AMBIENT


def _without_blocks(mode: Mode) -> Mode:
    return replace(mode, blocks=()) if mode.blocks else mode


def _in_common(one: Mode, other: Mode) -> Mode:
    return Mode(
        one.grad if one.grad == other.grad else None,
        one.inference if one.inference == other.inference else None,
        tuple(autocast for autocast in one.autocast if autocast in other.autocast),
    )
