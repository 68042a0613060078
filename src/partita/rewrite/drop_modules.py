"""Dropping the submodules that no node of a graph names."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import accumulate

from torch import nn
from torch.fx import Graph, GraphModule

from partita._torch.blank_modules import blank_module
from partita.rewrite.state import share_state

__all__ = ["drop_unused_modules"]


def drop_unused_modules(root: GraphModule) -> None:
    """Takes the modules that no node names out of `root`.

    A module that is named stays whole (torch 2.13 empties one that is read by get_attr), and nothing is taken out of a
    module that somebody else may hold as well: a plain container is replaced by one with less in it.
    """
    named = _targets(root.graph)
    folders = {folder for path in named for folder in accumulate(path.split(".")[:-1], "{}.{}".format)}
    unused = list(_unused(root, "", named, folders))
    for name, child in list(root._modules.items()):
        inside = frozenset(path.removeprefix(f"{name}.") for path in unused if path.startswith(f"{name}."))
        if name in unused:
            del root._modules[name]
        elif inside and child is not None:
            root._modules[name] = blank_module(training=child.training)
            share_state(child, root._modules[name], without=inside)  # type: ignore[arg-type]


def _targets(graph: Graph) -> Set[str]:
    nodes = (*graph.find_nodes(op="call_module", sort=False), *graph.find_nodes(op="get_attr", sort=False))
    return {node.target for node in nodes if isinstance(node.target, str)}


def _unused(module: nn.Module, prefix: str, named: Set[str], folders: Set[str]) -> Iterator[str]:
    """The paths of modules that are not named, nor inside or around one that is."""
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if path in named or child is None:
            continue
        if path not in folders:
            yield path
        elif type(child) is nn.Module:
            yield from _unused(child, f"{path}.", named, folders)
