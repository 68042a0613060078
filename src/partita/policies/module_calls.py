"""Module calls: which modules were running when each node was traced, whoever traced it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import nn
from torch.fx import Node

from partita.graphs.attributes import find

__all__ = ["ModuleCall", "calls_around"]


class ModuleCall(NamedTuple):
    """One call of a module: its key tells two calls of one module apart; the class is a type or its full name."""

    key: str
    path: str
    type: type | str


def calls_around(node: Node, root: nn.Module) -> tuple[ModuleCall, ...]:
    """The calls that `node` runs in, outermost first, without that of the program itself.

    A call of a module that carries no record of where it was made is in the modules that its own name mentions.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return _calls_by_name(str(node.target), root) if node.op == "call_module" else ()
    if not isinstance(stack, Mapping):
        return ()
    return tuple(
        ModuleCall(str(key), _plain_path(entry[0]), entry[1])
        for key, entry in stack.items()
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and _plain_path(entry[0])
    )


def _calls_by_name(target: str, root: nn.Module) -> tuple[ModuleCall, ...]:
    parts = target.split(".")
    paths = (".".join(parts[: count + 1]) for count in range(len(parts)))
    found = ((path, find(root, path)) for path in paths)
    return tuple(
        ModuleCall(path, path, type(module))
        for path, module in found
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
    )


@lru_cache(maxsize=4096)
def _plain_path(path: str) -> str:
    """The path below the module that was traced, or nothing for that itself.

    Dynamo says how it found the module: `L['self'].layers.0`, or `G['models'][0].layers.0`.
    """
    if path.startswith(_NO_RECORD):
        return ""
    below = _WHERE_DYNAMO_FOUND_IT.sub("", path)
    steps = _ITEM.sub(r".\1\2", below).split(".")
    return ".".join(step for step in steps if step and step != "_modules")


#: What torch.export writes where it adds nodes of its own.
_NO_RECORD = "_empty_nn_module_stack"
_WHERE_DYNAMO_FOUND_IT = re.compile(r"^[LG]\[['\"][^'\"]*['\"]\](\.__closure__\[\d+\]\.cell_contents)?")
#: An item by a text or a number, read in one go: nothing in it can be the beginning of another one.
_ITEM = re.compile(r"\[(?:['\"]([^'\"\]]*)['\"]|([^'\"\[\]]*))\]")
