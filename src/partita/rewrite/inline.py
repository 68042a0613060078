"""Inlining: a call of a body becomes the nodes of the body; the inverse of outlining and of wrapping modes."""

from __future__ import annotations

from collections.abc import Collection

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from partita._torch.pause_gc import gc_paused
from partita.errors import ModeError, OptionError
from partita.graphs.attributes import find
from partita.graphs.faithful import runs_its_graph
from partita.graphs.index import Index
from partita.graphs.mode import AMBIENT, Mode
from partita.graphs.modes import has_toggles, modes_of
from partita.graphs.program import Program
from partita.rewrite.bodies_of_operators import with_bodies
from partita.rewrite.inlining import BodyCall, Inlining
from partita.rewrite.mode_operators import runs_body, setting_of

__all__ = ["inline"]


def inline(program: Program | GraphModule | ExportedProgram, calls: Collection[str] | str | None = None) -> Program:
    """A new program with the bodies of these calls, by node name, in their place; of all bodies, at any depth, if None.

    Calls of graph modules and of operators that run a body under a mode, or just run it, can be inlined. A body is
    copied, never taken: whoever else calls it still can. A module with hooks, or with nested containers as arguments,
    or that leaves a mode switched, stays a call.
    """
    program = Program.of(program)
    with gc_paused():
        if calls is None:
            return _with_inlined_bodies(Inlining(program, _calls_in(program), _calls_in).inlined())
        return Inlining(program, _chosen(program, [calls] if isinstance(calls, str) else calls), _no_calls).inlined()


def _with_inlined_bodies(program: Program) -> Program:
    """`program` with everything inlined in the bodies that its operators still run: the branches of a `cond`, say."""
    changed = {}
    for node in program.graph.find_nodes(op="get_attr"):
        body = find(program.graph_module, str(node.target))
        if isinstance(body, GraphModule) and str(node.target) not in changed and _calls_at_any_depth(Program.of(body)):
            changed[str(node.target)] = inline(Program.of(body)).graph_module
    return with_bodies(program, changed) if changed else program


def _calls_at_any_depth(program: Program) -> bool:
    """Whether there is anything to inline in a body, or in the bodies that its operators run."""
    reads = program.graph.find_nodes(op="get_attr", sort=False)
    inner = (find(program.graph_module, str(node.target)) for node in reads)
    bodies = (Program.of(body) for body in inner if isinstance(body, GraphModule))
    return bool(_calls_in(program)) or any(map(_calls_at_any_depth, bodies))


def _calls_in(program: Program) -> dict[Node, BodyCall]:
    """The calls of a program that can be inlined."""
    found = {}
    for node in program.index.nodes:
        call = _body_call(program, node)
        if isinstance(call, BodyCall) and _left_behind(call) == AMBIENT:
            found[node] = call
    return found


def _no_calls(program: Program) -> dict[Node, BodyCall]:
    return {}


def _chosen(program: Program, names: Collection[str]) -> dict[Node, BodyCall]:
    found = {}
    wanted = frozenset(names)
    for node in program.index.nodes:
        call = _body_call(program, node) if node.name in wanted else None
        if isinstance(call, str):
            raise OptionError(f"node {node.name!r} calls {node.target!r}, which cannot be inlined: {call}")
        if call is not None:
            if (left := _left_behind(call)) != AMBIENT:
                raise ModeError(
                    f"the body that {node.name!r} calls leaves {left} behind, so it cannot be inlined; "
                    "close its blocks first"
                )
            found[node] = call
    missing = wanted - {node.name for node in found}
    if missing:
        raise OptionError(f"no call of a body is named {', '.join(sorted(map(repr, missing)))}")
    return found


def _body_call(program: Program, node: Node) -> BodyCall | str | None:
    """The call of a body that `node` is; None if it is none, or why it cannot be inlined."""
    read = None
    if node.op == "call_module":
        path, operands = str(node.target), node.args
    else:
        place = runs_body(node)
        if place is None:
            return None
        read = node.args[place] if place < len(node.args) else None
        if not isinstance(read, Node) or read.op != "get_attr":
            return "its body is no attribute of the program"
        path, operands = str(read.target), node.args[place + 1 :]
    body = find(program.graph_module, path)
    return _obstacle(body) or BodyCall(path, body, tuple(operands), dict(node.kwargs), setting_of(node), read)  # type: ignore[arg-type]


def _left_behind(call: BodyCall) -> Mode:
    """The modes that a body leaves switched; an operator that sets modes puts back what it found."""
    switches = call.sets is None and has_toggles(call.body.graph)
    return modes_of(Index(call.body.graph)).final if switches else AMBIENT


def _obstacle(body: object) -> str | None:
    """Why a body cannot be inlined, or None."""
    if not isinstance(body, GraphModule):
        return "it is no graph module"
    if not runs_its_graph(body):
        return "it has hooks, or a `forward` of its own, which would be lost"
    if type(body.graph._codegen) is not CodeGen:
        return "its inputs and outputs are trees that its own code takes apart"
    return None
