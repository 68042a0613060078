"""Gathering: every region becomes an unbroken run of nodes, and nothing else moves more than it must."""

from __future__ import annotations

from torch.fx import Node

from partita._torch.nodes import GraphWriter
from partita._torch.pause_gc import gc_paused
from partita.graphs.program import Program
from partita.graphs.summation import summation_tolerance
from partita.graphs.tolerance import EXACT
from partita.regions.partition import Partition
from partita.rewrite.assembly import module_like
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import share_state

__all__ = ["gather"]


def gather(partition: Partition) -> Program:
    """A new program, equal to the old one, in which the nodes of each region stand side by side."""
    program = partition.program
    index, modes, root = program.index, program.modes, program.graph_module
    with gc_paused():
        writer = GraphWriter(program.graph._tracer_cls)
        writer.names.reserve(node.name for node in index.nodes)
        switching = ModeWriter(writer, caller=program.caller)
        env: dict[Node, Node | None] = dict.fromkeys(modes.read)
        numbers = _gathered_numbers(partition)
        for number in numbers:
            node = index.nodes[number]
            if node.op != "get_attr":  # Reading an attribute means the same in every mode.
                switching.switch(modes.final if node.op == "output" else modes.at(number))
            env[node] = writer.copy(node, env.__getitem__, name=node.name)
        graph = writer.close()
        switching.close()
        module = module_like(root, graph, restores_modes=switching.has_switched)
        share_state(root, module, without=frozenset())
    return program.rewritten(module, tolerance=EXACT if numbers == sorted(numbers) else summation_tolerance(program))


def _gathered_numbers(partition: Partition) -> list[int]:
    nodes, regions = partition.program.index.nodes, len(partition)
    held = partition.numbers()
    gathered = [number for number, node in enumerate(nodes) if node.op == "placeholder"]
    for vertex in partition.order:
        gathered += held[vertex] if vertex < regions else [vertex - regions]
    # What several regions have a copy of is written once, where it is first needed.
    return [*dict.fromkeys(gathered), len(nodes) - 1]
