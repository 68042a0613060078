"""Other bodies for the operators of a program: a copy of it in which they run something else."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from partita.graphs.program import Program
from partita.regions import Partition
from partita.rewrite.outline import outlined
from partita.rewrite.unique_names import unique_names

__all__ = ["with_bodies"]


def with_bodies(program: Program, bodies: Mapping[str, GraphModule]) -> Program:
    """A copy of `program` that reads these bodies where it read those at these paths; the old ones stay as they are."""
    module = outlined(Partition(program, ())).graph_module
    # What lies deeper may be shared with the original, so it gets a place of its own at the top.
    deep = [path for path in bodies if "." in path]
    names = unique_names([path.replace(".", "_") for path in deep], module)
    moved = dict(zip(deep, names, strict=True))
    for node in module.graph.find_nodes(op="get_attr"):
        node.target = moved.get(str(node.target), node.target)
    for path, body in bodies.items():
        module._modules[moved.get(path, path)] = body
    return program.rewritten(module)
