"""Regions in the forward of a joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.fx.lazy_graph_module import lazy_module
from partita.errors import OptionError
from partita.program.joint import Joint
from partita.program.program import Program
from partita.regions.partition import Partition
from partita.regions.region import Region

__all__ = ["forward_alone", "forward_part"]


# Regions of a joint graph as its forward alone shows them, where what only the backward reads is no result.


def forward_alone(partition: Partition) -> tuple[Partition, Mapping[Node, Node]] | None:
    """The same regions in a program of the forward, and the node that each of its nodes stands for.

    None where the program is no joint graph, or where a region holds nodes of the backward.
    """
    if partition.program.joint is None:
        return None
    part = forward_part(partition.program)
    if not all(node in part.copies for region in partition for node in region.nodes):
        return None
    regions = [
        Region(region.name, tuple(part.copies[node] for node in region.nodes), region.label) for region in partition
    ]
    return Partition(part.program, regions), part.original


# The forward of a joint graph as a program of its own, for whoever decides about the forward alone.


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
