"""Writing sizes: a symbolic number as nodes that compute it from what the graph can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from partita._torch.nodes import GraphWriter
from partita._torch.operators import SYM_SIZE
from partita._torch.symbolic_nodes import write_number
from partita.errors import ModeError
from partita.graphs.program import Program
from partita.graphs.symbols import Dimension, Symbols
from partita.graphs.values import value_of
from partita.rewrite.traced_values import write_beside

__all__ = ["SizeWriter"]


class SizeWriter:
    """Writes sizes for new nodes; `env` maps the nodes of the program to what stands for them."""

    def __init__(self, program: Program, writer: GraphWriter, env: Mapping[Node, Any]) -> None:
        self._program, self._writer, self._env = program, writer, env
        self._symbols = Symbols(program.index)
        self._read: dict[Any, Node] = {}

    def size(self, size: torch.SymInt, node: Node) -> Node | int:
        """A node that gives `size`, which turned up in the place of `node`."""
        written = write_number(size, self._sources(node))
        if written is None:
            raise ModeError(
                f"node {node.name!r} needs the size {size} under autocast, which no input of the graph has; trace the "
                "program with sizes that are inputs"
            )
        if isinstance(written, Node):
            written.meta["val"] = size
        return written

    def _sources(self, node: Node) -> dict[Any, Node]:
        """The nodes that give the symbols which `node` and what it reads mention."""
        index = self._program.index
        number = index.number[node]
        for near in (*index.inputs(number), number):
            for place, symbol in self._symbols.sources(near):
                # What the node itself would give is not there yet.
                if symbol not in self._read and (place.number if isinstance(place, Dimension) else place) != number:
                    self._read[symbol] = self._node(place, node)
        return self._read

    def _node(self, place: int | Dimension, reader: Node) -> Node:
        nodes = self._program.index.nodes
        if not isinstance(place, Dimension):
            return self._env[nodes[place]]  # type: ignore[no-any-return]
        source, axis = nodes[place.number], place.axis
        value = value_of(source).shape[axis]
        return write_beside(self._writer, reader, SYM_SIZE, (self._env[source], axis), value=value)
