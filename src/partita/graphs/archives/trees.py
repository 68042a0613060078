"""Trees in a saved program: the containers of its inputs and outputs, as JSON text.

torch imports modules that such a text names: for the factory of a defaultdict, and for members of an Enum in a key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from partita._torch.pt2_trees import is_registered_container
from partita.graphs.archives.texts import literal_fault, name_fault

__all__ = ["NOT_REGISTERED_CONTAINER", "input_tree_fault", "tree_fault"]

NOT_REGISTERED_CONTAINER = "no such container is registered; import the module that registers it first"

_FACTORY_NAMES = {
    "builtins": "list dict set tuple frozenset int float bool str bytes complex",
    "collections": "OrderedDict deque Counter",
}
_FACTORIES = frozenset((module, name) for module, names in _FACTORY_NAMES.items() for name in names.split())


def tree_fault(text: str) -> str | None:
    """What is wrong with the text of a tree, or None."""
    root = _root(text)
    if root is None:
        return "it is no tree"
    return next(_faults(root), None)


def input_tree_fault(text: str) -> str | None:
    """The same for the inputs of a module, whose keywords become names of Python as well."""
    fault = tree_fault(text)
    root = _root(text)
    if fault is not None or root is None or root["type"] != "builtins.tuple" or len(root["children_spec"]) != 2:
        return fault
    named = root["children_spec"][1]
    if named["type"] != "builtins.dict":
        return None
    keys = _parsed(named["context"])
    return next((name_fault(key) for key in keys or () if not isinstance(key, str) or name_fault(key)), None)


def _root(text: str) -> Any:
    try:
        _, root = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return root if _is_node(root) else None


def _faults(root: Any) -> Iterator[str]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not _is_node(node):
            yield "it is no tree"
            return
        kind = node["type"]
        if kind is not None:
            if not isinstance(kind, str) or not is_registered_container(kind):
                yield f"{str(kind)[:200]!r}: {NOT_REGISTERED_CONTAINER}"
            yield from _context_faults(kind, node["context"])
        waiting += node["children_spec"]


def _is_node(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() >= {"type", "context", "children_spec"}
        and isinstance(value["children_spec"], list)
    )


def _context_faults(kind: Any, context: Any) -> Iterator[str]:
    if kind == "collections.defaultdict" and isinstance(context, dict):
        factory = (context.get("default_factory_module"), context.get("default_factory_name"))
        if factory not in _FACTORIES:
            yield f"the factory {'.'.join(map(str, factory))} of a defaultdict is no plain container or number"
        context = context.get("dict_context")
    for value in _leaves(_parsed(context)):
        if isinstance(value, dict):
            fault = _enum_fault(value)
        else:
            fault = literal_fault(value) if isinstance(value, str) else None
        if fault is not None:
            yield fault


def _parsed(context: Any) -> Any:
    """What a context holds: most are JSON text once more."""
    try:
        return json.loads(context) if isinstance(context, str) else context
    except (ValueError, RecursionError):
        return context


def _leaves(value: Any) -> Iterator[Any]:
    """Every text in a context, and every mapping that stands for a member of an Enum."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "__enum__" in value:
                yield value
            waiting += [*value.keys(), *value.values()] if "__enum__" not in value else []
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            yield value


def _enum_fault(value: dict[str, Any]) -> str | None:
    module, _, name = str(value.get("fqn")).partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None) if not part.startswith("__") else None
    if isinstance(found, type) and issubclass(found, Enum):
        return None
    return f"{str(value.get('fqn'))[:200]!r} is no Enum of a module that is imported here"
