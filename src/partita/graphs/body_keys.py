"""A key of a body: equal for two bodies of which the same code can be made, whatever nodes and tensors are called.

Unlike a fingerprint it holds the functions themselves, so that it is good for one process, and order counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.lasting import is_lasting
from partita.graphs.attributes import find
from partita.graphs.faithful import runs_its_graph

__all__ = ["body_key"]


def body_key(body: GraphModule) -> Hashable | None:
    """The key, or None for a body that holds something of which nobody knows whether it equals something else."""
    try:
        return _key_of_graph(body)
    except _UniqueError:
        return None


class _UniqueError(Exception):
    """Something equals nothing but itself."""


def _key_of_graph(module: GraphModule) -> Hashable:
    graph: Graph = module.graph
    number = {node: at for at, node in enumerate(graph.nodes)}
    groups: dict[Any, int] = {}
    return tuple(_key_of_node(node, module, number, groups) for node in number)


def _key_of_node(node: Node, root: GraphModule, number: dict[Node, int], groups: dict[Any, int]) -> Hashable:
    if node.op == "placeholder":
        return node.op, len(node.args)
    if node.op in ("get_attr", "call_module"):
        target: Hashable = _key_of_module(find(root, str(node.target)))
    else:
        target = node.target
    marks = node.meta.get("recompute"), groups.setdefault(node.meta.get("ac_graph_id"), len(groups))
    return node.op, target, _key_of(node.args, number), _key_of(node.kwargs, number), marks


def _key_of(value: Any, number: dict[Node, int]) -> Hashable:
    if isinstance(value, Node):
        return "node", number[value]
    if isinstance(value, tuple | list):
        return type(value).__name__, *(_key_of(item, number) for item in value)
    if isinstance(value, dict):
        return "dict", *((_key_of(key, number), _key_of(item, number)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", *(_key_of(item, number) for item in (value.start, value.stop, value.step))
    if type(value) in _PRINTED:
        return type(value), repr(value)
    if isinstance(value, _EQUAL) or is_lasting(value):
        return value  # type: ignore[no-any-return]
    raise _UniqueError


_PRINTED = (bool, int, float, complex, str, bytes, type(None), type(...))
_EQUAL = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _key_of_module(module: Any) -> Hashable:
    """The key of a module that is called, or of the body that an operator is given; its tensors are not part of it."""
    if isinstance(module, GraphModule):
        if not runs_its_graph(module):
            raise _UniqueError
        return "graph", _key_of_graph(module), *_names_of_tensors(module)
    if not isinstance(module, nn.Module) or "forward" in vars(module):
        raise _UniqueError
    children = ((name, _key_of_module(child)) for name, child in module._modules.items() if child is not None)
    kind: Hashable = type(module)  # type: ignore[assignment]
    return kind, *_names_of_tensors(module), *_settings_of(module), *children


def _names_of_tensors(module: nn.Module) -> Iterator[Hashable]:
    for table in (module._parameters, module._buffers):
        yield tuple((name, value is None) for name, value in table.items())


def _settings_of(module: nn.Module) -> Iterator[Hashable]:
    """What hangs on a module beside tensors and modules; who compiles for a call asks for the training flag itself."""
    for name, value in vars(module).items():
        if name in _TABLES or (isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")):
            continue
        yield name, "tensor" if isinstance(value, Tensor) else _key_of(value, {})


_TABLES = frozenset(vars(nn.Module()))
