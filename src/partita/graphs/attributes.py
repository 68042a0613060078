"""Attributes: what the dotted target of a node names on a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from partita.errors import MissingTargetError

__all__ = ["attribute_of", "find", "modules_in"]


def attribute_of(root: nn.Module, node: Node) -> Any:
    """What `node` names by its dotted target."""
    value = find(root, str(node.target))
    if value is None and not _exists(root, str(node.target)):
        raise MissingTargetError(
            f"Node target {node.target} not found! Node {node.name!r} ({node.op}) names it, but the module has nothing "
            "there; register it on the module, or erase the node"
        )
    return value


def find(root: nn.Module, path: str) -> Any:
    """What stands at a dotted path, or None."""
    value: Any = root
    for part in path.split("."):
        # Most of a path is modules, and asking a module for an attribute takes it three tables and a miss.
        inner = value._modules.get(part) if isinstance(value, nn.Module) else None
        value = getattr(value, part, None) if inner is None else inner
    return value


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and all modules inside it, each once, as `root.modules()` has them, in linear time in deep nests too."""
    seen: set[nn.Module] = set()
    found = [root]
    while found:
        module = found.pop()
        if module not in seen:
            seen.add(module)
            yield module
            found += [child for child in reversed(module._modules.values()) if child is not None]


def _exists(root: nn.Module, path: str) -> bool:
    """Whether something stands at a path, even if that is None."""
    folder, _, name = path.rpartition(".")
    return hasattr(find(root, folder) if folder else root, name)
