"""Saving an exported program to a `.pt2` archive that holds each body once, however many calls share it.

The format has a graph in the argument of every call. Loaders register graphs by name, and a later one takes the place
of an earlier one of its name (torch 2.13, and the reader in this package). So the last call that shares a body has its
graph, and those before it have an empty graph of that name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._export.serde.serialize import GraphModuleSerializer
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from partita.analysis.nodes import find

_SAVING = Lock()


def save_exported(
    exported: ExportedProgram, path: str | os.PathLike[str], *, extra_files: Mapping[str, Any] | None = None
) -> None:
    """Writes the program to a file, as `torch.export.save` does, with each body once."""
    with _SAVING, _each_body_once(exported.graph_module):
        torch.export.save(exported, path, extra_files=None if extra_files is None else dict(extra_files))


@contextmanager
def _each_body_once(module: GraphModule) -> Iterator[None]:
    """Lets torch's serializer write the bodies in this module at their last call; others it writes as ever."""
    coming = Counter(_reads_of_bodies(module))
    serialize_input = GraphModuleSerializer.serialize_input

    def serialize(self: Any, arg: Any, *rest: Any, **keywords: Any) -> Any:
        key = (arg.graph, str(arg.target)) if isinstance(arg, Node) and arg.op == "get_attr" else None
        if key is not None and coming[key] > 1:
            coming[key] -= 1
            arg = _read_of_nothing(str(arg.target))
        return serialize_input(self, arg, *rest, **keywords)

    with patch.object(GraphModuleSerializer, "serialize_input", serialize):
        yield


def _reads_of_bodies(module: GraphModule) -> Iterator[tuple[Any, str]]:
    """Every read of a body by a call in a module, or in a body inside of it: the graph that reads it, and its name."""
    for inner in dict.fromkeys(module.modules()):
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            reads = (read for read in node.args if isinstance(read, Node) and read.op == "get_attr")
            for name in (str(read.target) for read in reads):
                if isinstance(find(inner, name), GraphModule):
                    yield inner.graph, name


def _read_of_nothing(name: str) -> Node:
    """The read of a body of this name without nodes."""
    nothing, root = Graph(), nn.Module()
    nothing.output(())
    root.add_module(name, GraphModule(nn.Module(), nothing))
    reading = Graph()
    read = reading.get_attr(name)
    reading.output(())
    reading.owning_module = GraphModule(root, reading)
    return read
