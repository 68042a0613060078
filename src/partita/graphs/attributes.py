"""Attributes: what the dotted target of a node names on a module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from partita.errors import MissingTargetError

__all__ = ["attribute_of", "find"]


def attribute_of(root: nn.Module, node: Node) -> Any:
    """What `node` names by its dotted target."""
    value: Any = root
    for part in str(node.target).split("."):
        if not hasattr(value, part):
            raise MissingTargetError(
                f"Node target {node.target} not found! Node {node.name!r} ({node.op}) names it, but the module has no "
                f"{part!r} there; register it on the module, or erase the node"
            )
        value = getattr(value, part)
    return value


def find(root: nn.Module, path: str) -> Any:
    """What stands at a dotted path, or None."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
