"""Marking: a copy of a program whose nodes carry more metadata."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from partita.graphs.program import Program
from partita.regions import Partition
from partita.rewrite.outline import outlined

__all__ = ["add_marks", "marked"]


def marked(program: Program, marks: Mapping[Node, Mapping[str, object]]) -> Program:
    """`program` with the given metadata on the given nodes; the original and its metadata stay as they are."""
    module = outlined(Partition(program, ())).graph_module
    by_name = {node.name: values for node, values in marks.items()}
    for node in module.graph.nodes:
        node.meta.update(by_name.get(node.name, {}))
    return program.rewritten(module)


def add_marks(body: GraphModule, marks: Mapping[str, object]) -> None:
    """Writes `marks` on every operator of a body that nobody has seen yet."""
    for node in body.graph.nodes if marks else ():
        if node.op not in ("placeholder", "output"):
            node.meta.update(marks)
