"""Parameter bytes: how many bytes of parameters each node is the first to use."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import Node

from partita._torch.schemas import storage_key
from partita.graphs.attributes import find
from partita.graphs.program import Program
from partita.graphs.values import value_of

__all__ = ["first_use_bytes"]


def first_use_bytes(program: Program) -> list[int]:
    """For each node by number the bytes of the parameters that no node before it uses; tied ones count once.

    Parameters are what a node reads by `get_attr`, what it reads from an input that was traced as a parameter, as
    Dynamo does, and what the module that it calls holds.
    """
    root, seen, sizes = program.graph_module, set(), []
    for node in program.index.nodes:
        total = 0
        if node.op.startswith("call_"):
            for parameter in _parameters(node, root):
                key = storage_key(parameter)
                if key not in seen:
                    seen.add(key)
                    total += parameter.numel() * parameter.element_size()
        sizes.append(total)
    return sizes


def _parameters(node: Node, root: nn.Module) -> Iterator[Tensor]:
    if node.op == "call_module":
        module = find(root, str(node.target))
        if isinstance(module, nn.Module):
            yield from module.parameters()
    for read in node.all_input_nodes:
        if read.op == "get_attr":
            value = find(root, str(read.target))
        else:
            value = value_of(read) if read.op == "placeholder" else None
        if isinstance(value, nn.Parameter):
            yield value
