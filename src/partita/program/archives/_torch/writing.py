"""Saving an exported program to a `.pt2` archive that holds each body once, however many calls share it.

The format has a graph in the argument of every call. Loaders register graphs by name, and a later one takes the place
of an earlier one of its name (torch 2.13, and the reader in this package). So the last call that shares a body has its
graph, and those before it have an empty graph of that name.
"""

from __future__ import annotations

import cmath
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch._export.serde.serialize import GraphModuleSerializer
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from partita.analysis.nodes import find, value_of
from partita.errors import ArchiveError
from partita.program.archives.data import LARGEST_SCALAR, SMALLEST_INTEGER

_SAVING = Lock()


def save_exported(
    exported: ExportedProgram, path: str | os.PathLike[str], *, extra_files: Mapping[str, Any] | None = None
) -> None:
    """Writes the program to a file, as `torch.export.save` does, with each body once."""
    _check_numbers(exported)
    with _SAVING, _each_body_once(exported.graph_module):
        try:
            torch.export.save(exported, path, extra_files=None if extra_files is None else dict(extra_files))
        except (AssertionError, RuntimeError) as error:
            is_about_program = isinstance(error, AssertionError | NotImplementedError)
            if not is_about_program and type(error).__name__ != "SerializeError":
                raise  # It is not about the program: a folder that is not there, a full disk.
            last = [line for line in str(error).splitlines() if line.strip()][-1:] or ["no more is known"]
            raise ArchiveError(f"torch {torch.__version__} cannot save the program: {last[0].strip()[:300]}") from error


def _check_numbers(exported: ExportedProgram) -> None:
    """Raises if the program has a number that no file can hold."""
    for module in _graph_modules(exported.graph_module):
        for node in module.graph.nodes:
            value = value_of(node) if node.op == "placeholder" else None
            if type(value) in _WITHOUT_NAMES or (type(value) is int and node.users):
                _refuse(f"the input {node.name!r} of a graph", "keep what computes it and what reads it in one region")
            map_aggregate((node.args, node.kwargs, value), partial(_check_number, node))
    for result in exported.graph.output_node().args[0]:
        if isinstance(result, Node) and isinstance(value_of(result), torch.SymBool | bool):
            _refuse(f"the result {result.name!r}", "return a tensor in the place of the truth value")


def _check_number(node: Node, number: Any) -> Any:
    is_large = type(number) is int and not SMALLEST_INTEGER <= number <= LARGEST_SCALAR
    if is_large or (isinstance(number, complex) and not cmath.isfinite(number)):
        _refuse(f"{str(number)[:40]} at {node.name!r}", "integers have 64 bits, and complex numbers are finite")
    return number


def _refuse(what: str, advice: str) -> NoReturn:
    raise ArchiveError(f"{what} is a number that no file of torch {torch.__version__} can hold; {advice}")


#: torch's serializer knows no inputs of graphs that are such numbers.
_WITHOUT_NAMES = (torch.SymFloat, torch.SymBool)


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
    for inner in _graph_modules(module):
        for node in inner.graph.nodes:
            reads = (read for read in node.args if isinstance(read, Node) and read.op == "get_attr")
            for name in (str(read.target) for read in reads):
                if isinstance(find(inner, name), GraphModule):
                    yield inner.graph, name


def _graph_modules(module: GraphModule) -> list[GraphModule]:
    return [inner for inner in dict.fromkeys(module.modules()) if isinstance(inner, GraphModule)]


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
