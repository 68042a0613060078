"""Dissolving modes: a program of plain operators that means the same, without toggles and without mode operators."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from partita._torch.pause_gc import gc_paused
from partita.errors import ModeError
from partita.graphs.attributes import find
from partita.graphs.program import Program
from partita.rewrite.dissolve_autocast import dissolve_autocast
from partita.rewrite.dissolve_bodies import dissolve_bodies
from partita.rewrite.dissolve_grad import dissolve_grad
from partita.rewrite.gradient_carriers import records_gradients
from partita.rewrite.inline import inline
from partita.rewrite.mode_operators import setting_of

__all__ = ["dissolve"]


@gc_paused()
def dissolve(program: Program | GraphModule | ExportedProgram) -> Program:
    """A program that means the same by operators alone: casts for autocast, `detach` for no_grad and inference mode.

    Each node that runs under autocast is run once on fake tensors, to see what autocast itself casts; it needs the
    traced values that `partita.capture`, torch.export and make_fx leave on nodes. A program that switches no modes
    comes back as it is.

    The caller is taken to record gradients, and to have no autocast on: `enable_grad` in the program has no counterpart
    among operators, so called under no_grad the program records none. Inputs that require gradients are taken to be
    leaves, whose casts autocast keeps within a block. What inference mode makes is a plain tensor afterwards. A view
    that is made under no_grad of a tensor with gradients says that it requires some, although none ever arrive; here it
    says that it does not.
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
    bodies = (find(program.graph_module, str(node.target)) for node in program.index.nodes if _names_module(node))
    return any(_has_modes(Program.of(body)) for body in bodies if isinstance(body, GraphModule))


def _names_module(node: Node) -> bool:
    return node.op in ("get_attr", "call_module")


def _check_closed(program: Program) -> None:
    final = program.modes.final
    if final.grad is False or final.inference is not None or final.autocast:
        raise ModeError(
            f"the program leaves {final} behind for its caller, which no plain operator can do; close its blocks"
        )
