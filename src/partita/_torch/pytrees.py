"""Trees: nested containers flattened into leaves with paths, mapped, and rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils import _pytree as pytree

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


@dataclass(frozen=True, slots=True)
class Tree:
    """The leaves of a value, the path of each as Python text such as `[0]['loss']`, and the containers around them."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def rebuilt(self, leaves: Iterable[Any]) -> Any:
        """The same containers, new objects, around other leaves."""
        return self.structure.unflatten(leaves)


def flatten(value: Any) -> Tree:
    """`value` as a tree, with every container type that torch knows or that was registered with it."""
    pairs, structure = pytree.tree_flatten_with_path(value)
    return Tree(tuple("".join(map(str, path)) for path, _ in pairs), tuple(leaf for _, leaf in pairs), structure)


def leaves_of(value: Any) -> list[Any]:
    """Everything in a value that is no container, in order."""
    found: list[Any] = []
    _add_leaves(value, found)
    return found


def _add_leaves(value: Any, found: list[Any]) -> None:
    """Recorders of operators call it for each: what their arguments are made of is known without torch's registry."""
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _add_leaves(item, found)
    elif kind is dict:
        for item in value.values():
            _add_leaves(item, found)
    elif kind in _LEAVES or isinstance(value, Tensor):
        found.append(value)
    else:
        found += pytree.tree_flatten(value)[0]


_LEAVES = frozenset((type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with `change(leaf)` in place of everything in it that is no container."""
    leaves, structure = pytree.tree_flatten(value)
    return structure.unflatten([change(leaf) for leaf in leaves])


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with `change(tensor)` in place of each of its tensors."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def keywords_of(graph: Graph) -> list[str]:
    """The keyword arguments that a call of a graph takes, in the order of the inputs for them."""
    trees = getattr(graph._codegen, "pytree_info", None)
    spec = None if trees is None else trees.in_spec
    return list(spec.children()[1].context or ()) if spec is not None and spec.num_children == 2 else []
