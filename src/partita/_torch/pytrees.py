"""Trees: nested containers flattened into leaves with paths, and rebuilt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Tree:
    """The leaves of a value, the path of each as Python text such as `[0]['loss']`, and the containers around them."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def rebuilt(self, leaves: Iterable[Any]) -> Any:
        """The same containers, new objects, around other leaves."""
        return pytree.tree_unflatten(list(leaves), self.structure)


def flatten(value: Any) -> Tree:
    """`value` as a tree, with every container type that torch knows or that was registered with it."""
    pairs, structure = pytree.tree_flatten_with_path(value)
    return Tree(tuple(pytree.keystr(path) for path, _ in pairs), tuple(leaf for _, leaf in pairs), structure)


def keywords_of(graph: Graph) -> list[str]:
    """The keyword arguments that a call of a graph takes, in the order of the inputs for them."""
    trees = getattr(graph._codegen, "pytree_info", None)
    spec = None if trees is None else trees.in_spec
    return list(spec.children()[1].context or ()) if spec is not None and spec.num_children == 2 else []
