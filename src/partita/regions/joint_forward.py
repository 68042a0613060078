"""The forward of a joint graph as a program of its own, in which values that only the backward reads are no results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter
from partita._torch.fx.lazy_graph_module import lazy_module
from partita.errors import OptionError
from partita.program.joint import Joint
from partita.program.program import Program, neighbours
from partita.regions.partition import Partition
from partita.regions.region import Region


def forward_alone(partition: Partition) -> tuple[Partition, Mapping[Node, Node]] | None:
    """The same regions in a program of the forward, and the original of each of its nodes.

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


@final
@dataclass(frozen=True, slots=True)
class ForwardPart:
    """A program of the nodes and results of the forward alone."""

    program: Program
    #: From nodes of the program to nodes of the joint graph.
    original: Mapping[Node, Node]
    #: From nodes of the joint graph to their copies in the program.
    copies: Mapping[Node, Node]


def forward_part(program: Program) -> ForwardPart:
    """The forward of a joint graph, without nodes that must run after some of the backward, as mutations may.

    So regions that are legal in the result are legal in the joint graph as well. A forward is its own.
    """
    if program.is_forward:
        same = {node: node for node in program.index.nodes[:-1]}
        return ForwardPart(program, same, same)
    if program.joint is None:
        raise OptionError(
            "only a joint graph has a forward and a backward: trace one with partita.capture_joint(model, args), or "
            "pass Program.of the number of forward_outputs"
        )
    late = _late(program, program.joint)
    kept = [node for number, node in enumerate(program.index.nodes[:-1]) if not late[number]]
    excluded = set(program.index.nodes) - set(kept)
    writer, env = GraphWriter.like(program.graph), dict[Any, Any]()
    writer.names.reserve({node.name for node in kept} | {"output"})
    writer.copy_run(kept, env, [node.name for node in kept])
    returned = tuple(env.get(value, value) for value in program.joint.forward_outputs if value not in excluded)
    writer.write("output", "output", (returned,), name="output")
    module = lazy_module(writer.close(), training=program.graph_module.training)
    _share_attributes(program.graph_module, module)
    forward = Program(module, pure=program.pure, caller=program.caller, is_forward=True)
    return ForwardPart(forward, {copied: node for node, copied in env.items()}, env)


def _late(program: Program, joint: Joint) -> list[bool]:
    """Whether each node belongs to the backward or must run after a node that does."""
    index = program.index
    late = [False] * len(index)
    for node in (*joint.tangents, *joint.backward):
        late[index.number[node]] = True
    before = program.once(neighbours).before
    for number in range(len(index)):
        late[number] = late[number] or any(late[earlier] for earlier in before.get(number, ()))
    return late


def _share_attributes(root: GraphModule, module: GraphModule) -> None:
    """Sets the attributes of the module that its nodes name."""
    named = (node for op in ("get_attr", "call_module") for node in module.graph.find_nodes(op=op))
    for name in dict.fromkeys(str(node.target).partition(".")[0] for node in named):
        if hasattr(root, name):
            setattr(module, name, getattr(root, name))
