"""Wrapping modes: every run of nodes that a setting holds for becomes one call of the operator that sets it.

Nested settings become nested calls, in the bodies and in the bodies of other operators too. What a program leaves
behind for its caller is not kept: an operator puts back what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from partita._torch.pause_gc import gc_paused
from partita.graphs.attributes import find
from partita.graphs.mode import AMBIENT, Autocast, Grad, Inference, Mode, identifier_of
from partita.graphs.mode_runs import EVERY_SETTING, ModeRun, mode_runs
from partita.graphs.program import Program
from partita.regions import Partition, Region
from partita.rewrite.bodies_of_operators import with_bodies
from partita.rewrite.mode_operators import OperatorFamily, operator_for, setting_of
from partita.rewrite.operator_calls import call_through
from partita.rewrite.outer_graph import OutlineStyle, Surroundings, style_for
from partita.rewrite.outline import outlined
from partita.rewrite.rewritten import rewritten
from partita.rewrite.state_keys import MovedByPart
from partita.rewrite.unique_names import unique_names

__all__ = ["WrapStyle", "wrap_modes"]


@dataclass(frozen=True, slots=True)
class WrapStyle:
    """Whose operators are written, for which kinds of settings, and how bodies and calls are named."""

    operators: OperatorFamily = "partita"
    kinds: Collection[type] = EVERY_SETTING
    #: Names for the bodies, which are numbered where they are taken; by what is set if there is none.
    names: Callable[[Program, Sequence[ModeRun]], Sequence[str]] | None = None
    named_by_operator: bool = False


@gc_paused()
def wrap_modes(program: Program, style: WrapStyle | None = None) -> Program:
    """A new program that sets modes by operators; the same object if it switches none and calls no body that does."""
    return _Wrapper(style or WrapStyle(), style_for(program)).wrapped(program)


class _Wrapper:
    """What is the same at every level."""

    def __init__(self, style: WrapStyle, outline_style: OutlineStyle) -> None:
        self.style, self.outline_style = style, outline_style
        self.kinds = style.kinds

    def wrapped(self, program: Program) -> Program:
        if program.modes.by_number is None:
            return self._with_wrapped_bodies(program, without=())
        result, names = self._with_calls(program)
        return self._with_wrapped_bodies(result, without=names)

    def _with_calls(self, program: Program) -> tuple[Program, Collection[str]]:
        """`program` with a call for each of its outermost runs, and the names of their bodies."""
        runs = mode_runs(program, self.kinds)
        nodes = program.index.nodes
        names = self._names(program, runs)
        regions = [
            Region(name, tuple(nodes[number] for number in run.numbers), str(run.sets))
            for name, run in zip(names, runs, strict=True)
        ]
        surroundings = Surroundings(
            [run.around for run in runs], [run.inside for run in runs], self._left_behind(program.modes.final)
        )
        cut = outlined(Partition(program, regions), names=names, style=self.outline_style, surroundings=surroundings)
        module, moved = cut.graph_module, MovedByPart(cut.moved)
        for name, body, run in zip(cut.names, cut.bodies, runs, strict=True):
            caller = replace(run.inside.within(program.caller), blocks=())
            inside = self.wrapped(Program(body, pure=program.pure, caller=caller)).graph_module
            module._modules[name] = inside
            moved.settle(name, body, inside)
        operators = (operator_for(run.sets, self.style.operators) for run in runs)
        calls = dict(zip(cut.names, operators, strict=True))
        call_through(module, calls, named_by_operator=self.style.named_by_operator)
        keys = program.state_keys.then(moved.settled)
        return rewritten(program, module, state_keys=keys, tolerance=cut.tolerance), frozenset(cut.names)

    def _names(self, program: Program, runs: Sequence[ModeRun]) -> Sequence[str]:
        wanted = self.style.names(program, runs) if self.style.names else [identifier_of(run.sets) for run in runs]
        return unique_names(wanted, program.graph_module)

    def _left_behind(self, final: Mode) -> Mode:
        """What toggles that stay leave behind."""
        blocks = tuple(block for block in final.blocks if type(block.sets) not in self.kinds)
        return Mode(
            None if Grad in self.kinds else final.grad,
            None if Inference in self.kinds else final.inference,
            () if Autocast in self.kinds else final.autocast,
            blocks,
        )

    def _with_wrapped_bodies(self, program: Program, *, without: Collection[str]) -> Program:
        """`program` with the bodies of its operators wrapped inside, but for those that are already."""
        changed: dict[str, GraphModule] = {}
        for node in program.graph.find_nodes(op="get_attr"):
            path, body = str(node.target), find(program.graph_module, str(node.target))
            if isinstance(body, GraphModule) and path not in without and path not in changed:
                inner = Program(body, pure=program.pure, caller=_caller_of_body(program, node))
                wrapped = self.wrapped(inner)
                if wrapped is not inner:
                    changed[path] = wrapped.graph_module
        return with_bodies(program, changed) if changed else program


def _caller_of_body(program: Program, body: Node) -> Mode:
    """What is known of the modes that a body is run under: what all the calls of it have in common."""
    modes = set()
    for call in body.users:
        mode, setting = program.modes.at(program.index.number[call]), setting_of(call)
        modes.add(mode if setting is None else mode.setting(setting))
    mode = modes.pop() if len(modes) == 1 else AMBIENT
    return replace(mode.within(program.caller), blocks=())
