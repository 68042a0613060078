"""What the tests of policies share: graphs written by hand, captures, and what a partition looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from partita import Partition, Program


def parts(partition: Partition) -> list[list[str]]:
    """The names of the nodes of each region."""
    return [[node.name for node in region.nodes] for region in partition]


def program_of(write: Callable[[Graph], Any], root: nn.Module | None = None) -> Program:
    """The program that `write` writes; it returns the output."""
    graph = Graph()
    graph.output(write(graph))
    return Program.of(GraphModule(root or nn.Module(), graph))


def exported(model: nn.Module) -> GraphModule:
    """As torch.export records it on an input of 2 x 4."""
    return _exported(model, strict=False)


def exported_strictly(model: nn.Module) -> GraphModule:
    """As torch.export records it through Dynamo."""
    return _exported(model, strict=True)


def dynamo(model: nn.Module) -> GraphModule:
    """As Dynamo records it, parameters as inputs."""
    taken: list[GraphModule] = []

    def record(graph_module: GraphModule, _: object) -> GraphModule:
        taken.append(graph_module)
        return graph_module

    torch.compiler.reset()
    torch.compile(model, backend=record, fullgraph=True)(torch.ones(2, 4))
    return taken[0]


def _exported(model: nn.Module, *, strict: bool) -> GraphModule:
    module = torch.export.export(model, (torch.ones(2, 4),), strict=strict).module()
    assert isinstance(module, GraphModule)
    return module
