"""Bare bodies: the body of a region in one mode, without the toggles that set it, and the mode itself."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import GraphModule, Node

from partita._torch.lazy_modules import lazy_module
from partita._torch.nodes import GraphWriter
from partita.errors import ModeError
from partita.graphs.mode import AMBIENT, Mode
from partita.graphs.program import Program
from partita.rewrite.state import place

__all__ = ["BareBody", "bare_body"]


class BareBody(NamedTuple):
    """A body whose nodes all run under `mode`, which whoever calls it has to set."""

    mode: Mode
    module: GraphModule


def bare_body(program: Program) -> BareBody:
    """The body that `program` is, without toggles; it must hold one mode."""
    if program.modes.by_number is None:
        return BareBody(AMBIENT, program.graph_module)
    return BareBody(_only_mode(program), _without_toggles(program))


def _only_mode(program: Program) -> Mode:
    """The mode of all nodes that compute something; items of containers and numbers are the same in every mode."""
    modes = program.modes
    idle = modes.toggles | program.symbolic_scalars | frozenset(program.projections)
    first: int | None = None
    for number, node in enumerate(program.index.nodes):
        if number in idle or node.op in ("placeholder", "get_attr", "output"):
            continue
        first = number if first is None else first
        if modes.at(number) != modes.at(first):
            raise ModeError(
                f"{program.index.nodes[first].name!r} runs under {modes.at(first)} and {node.name!r} under "
                f"{modes.at(number)}, but a body is compiled in one mode; cut it where the mode changes"
            )
    return AMBIENT if first is None else modes.at(first)


def _without_toggles(program: Program) -> GraphModule:
    source, nodes, toggles = program.graph_module, program.index.nodes, program.modes.toggles
    writer = GraphWriter(program.graph._tracer_cls)
    kept = [node for number, node in enumerate(nodes) if number not in toggles]
    writer.names.reserve(node.name for node in kept)
    # The result of a toggle that somebody reads is None.
    env: dict[Node, object] = dict.fromkeys(program.modes.read)
    writer.copy_run(kept, env, [node.name for node in kept])
    graph = writer.close()
    module = lazy_module(
        graph, training=source.training, is_impure=bool(getattr(source, "_is_impure", False)), is_part=True
    )
    for path in {str(node.target): None for node in kept if node.op in ("get_attr", "call_module")}:
        place(module, path, source.get_submodule(path))
    return module
