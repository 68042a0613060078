"""ByMode: regions of nodes that run under the same grad, inference or autocast mode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, final

from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.analysis.modes import AMBIENT, Mode, has_toggles, identifier_of, traced_grad
from partita.analysis.nodes import bodies_of, bodies_read
from partita.errors import OptionError
from partita.policies.legalize import distinct_names
from partita.program.mode_runs import mode_runs
from partita.program.program import Program
from partita.regions import Partition, Region


@final
@dataclass(frozen=True, slots=True)
class ByMode(metaclass=PlainHelp):
    """A region for each outermost run of nodes in a mode that differs from the caller's, labelled by what it sets.

    Modes nested in a mode stay inside its region. An operator whose bodies switch modes, a `cond` say, is a region of
    its own. `caller_grad` is the grad mode that the program is called under: a run in that mode is no region. "traced"
    assumes nothing of a graph that restores the modes it found, as captured ones do. A graph that sets constants and
    ends with True was traced with gradients on, so `set_grad_enabled(True)` in it means: as the caller has it. In one
    whose blocks end with False, traced under `no_grad`, constants are taken literally.
    """

    caller_grad: bool | Literal["traced"] | None = "traced"

    def __post_init__(self) -> None:
        if self.caller_grad not in (True, False, None, "traced"):
            raise OptionError(f'caller_grad is True, False, None (unknown) or "traced", not {self.caller_grad!r}')

    def __call__(self, program: Program) -> Partition:
        program = program.under(self._caller(program))
        nodes, runs = program.index.nodes, mode_runs(program)
        held = {nodes[number] for run in runs for number in run.numbers}
        alone = [call for call in _calls_of_switching_bodies(program) if call not in held]
        names = iter(distinct_names([*(identifier_of(run.sets) for run in runs), *(call.name for call in alone)]))
        regions = [Region(next(names), tuple(nodes[n] for n in run.numbers), str(run.sets)) for run in runs]
        regions += [Region(next(names), (call,), "modes inside") for call in alone]
        owned = held.union(alone)
        reasons = {
            node: "it runs in the caller's modes"
            for number, node in enumerate(nodes)
            if node.op not in ("placeholder", "output", "get_attr")
            and node not in owned
            and number not in program.modes.toggles
            and number not in program.projections
        }
        return Partition(program, regions, reasons)

    def _caller(self, program: Program) -> Mode:
        if self.caller_grad != "traced":
            return replace(program.caller, grad=self.caller_grad)
        # In a graph traced without gradients, a block that disables them looks like the code around it.
        return Mode(grad=True) if program.caller == AMBIENT and traced_grad(program.graph_module) else program.caller


def _calls_of_switching_bodies(program: Program) -> Collection[Node]:
    """The operators whose body switches modes, itself or in nested bodies."""
    calls: dict[Node, None] = {}
    for read, body in bodies_read(program.graph_module, program.graph.find_nodes(op="get_attr")):
        if _switches_modes(body):
            calls |= read.users
    return calls


def _switches_modes(body: GraphModule) -> bool:
    return has_toggles(body.graph) or any(map(_switches_modes, bodies_of(body)))
