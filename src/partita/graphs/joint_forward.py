"""The forward of a joint graph as a program of its own, for whoever decides about the forward alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule, Node

from partita._torch.lazy_modules import lazy_module
from partita._torch.nodes import GraphWriter
from partita.errors import OptionError
from partita.graphs.joint import Joint
from partita.graphs.program import Program

__all__ = ["ForwardPart", "forward_part"]


@final
@dataclass(frozen=True, slots=True)
class ForwardPart:
    """A program of the nodes of the forward, which gives what the forward gives; nobody knows of a backward there."""

    program: Program
    #: For each node of the program, the one of the joint graph that it stands for.
    original: Mapping[Node, Node]
    #: The other way round, for the nodes of the joint graph that are in the program.
    copies: Mapping[Node, Node]


def forward_part(program: Program) -> ForwardPart:
    """The forward of a joint graph; nodes of it that must run after some of the backward, as writes may, are left out.

    So regions that are legal in the result are legal in the joint graph as well.
    """
    if program.joint is None:
        raise OptionError(
            "only a joint graph has a forward and a backward: trace one with partita.capture_joint(model, args), or "
            "give Program.of the number of forward_outputs"
        )
    late = _late(program, program.joint)
    kept = [node for number, node in enumerate(program.index.nodes[:-1]) if not late[number]]
    behind = set(program.index.nodes) - set(kept)
    writer, env = GraphWriter(program.graph._tracer_cls), dict[Any, Any]()
    writer.names.reserve({node.name for node in kept} | {"output"})
    writer.copy_run(kept, env, [node.name for node in kept])
    returned = tuple(env.get(value, value) for value in program.joint.forward_outputs if value not in behind)
    writer.write("output", "output", (returned,), name="output")
    module = lazy_module(writer.close(), training=program.graph_module.training)
    _share_attributes(program.graph_module, module)
    forward = Program(module, pure=program.pure, caller=program.caller)
    return ForwardPart(forward, {copied: node for node, copied in env.items()}, env)


def _late(program: Program, joint: Joint) -> list[bool]:
    """Whether each node belongs to the backward or must stay after something that does."""
    index = program.index
    late = [False] * len(index)
    for node in (*joint.tangents, *joint.backward):
        late[index.number[node]] = True
    after: dict[int, list[int]] = {}
    for before, behind in program.effects.edges():
        after.setdefault(behind, []).append(before)
    for number in range(len(index)):
        earlier = (*index.inputs(number), *after.get(number, ()))
        late[number] = late[number] or any(map(late.__getitem__, earlier))
    return late


def _share_attributes(root: GraphModule, module: GraphModule) -> None:
    """Gives the module what its nodes name."""
    named = (node for op in ("get_attr", "call_module") for node in module.graph.find_nodes(op=op))
    for name in dict.fromkeys(str(node.target).partition(".")[0] for node in named):
        if hasattr(root, name):
            setattr(module, name, getattr(root, name))
