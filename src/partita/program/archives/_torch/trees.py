"""Pytree specs of a saved program, built from data: containers of known types only."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any

from torch.utils import _pytree as pytree

from partita.program.archives.data import Data

_DEEPEST = 100


def read_tree(data: Data) -> pytree.TreeSpec:
    """The tree spec in a string of the file; `torch.utils._pytree.treespec_loads` would import what it names."""
    version, *roots = data.nested()
    if version.value != 1 or len(roots) != 1:
        data.malformed("it is no tree of version 1")
    return _tree(roots[0], _DEEPEST)


def _tree(data: Data, depth: int) -> pytree.TreeSpec:
    if depth == 0:
        data.malformed(f"it is nested more than {_DEEPEST} deep")
    children = [_tree(child, depth - 1) for child in data["children_spec"]]
    if data["type"].value is None:
        return pytree.treespec_leaf()
    container = _registered(data["type"])
    context = _CONTEXTS.get(container, _registered_context)(container, data["context"])
    keys = context[1] if container is defaultdict else context if container in (dict, OrderedDict) else children
    if len(keys) != len(children):
        data.malformed(f"it has {len(keys)} keys and {len(children)} children")
    return pytree.TreeSpec(container, context, children)


def _registered(data: Data) -> Any:
    name = data.text()
    if name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        data.refuse("it stands for any container that was registered without a name, and so not to be saved")
    found = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    own_name = pytree.SUPPORTED_SERIALIZED_TYPES[found].serialized_type_name if found is not None else None
    if name != own_name:
        data.malformed(f"no container {name[:200]!r} is registered; import the module that registers it first")
    return found


def _keys(_: Any, context: Data) -> list[Any]:
    return [_key(key) for key in context.nested()]


def _key(key: Data) -> Any:
    """A string, a number, or a member of an Enum that is already imported; nothing is called."""
    if isinstance(key.value, str):
        return key.plain_text()
    if key.value is None or isinstance(key.value, bool | int | float):
        return key.value
    named, member = key["fqn"].text(), key["name"].text()
    members = _enum(named).__members__
    return members[member] if member in members else key.refuse(f"{named[:100]!r} is no Enum that is imported here")


@lru_cache(maxsize=64)
def _enum(named: str) -> type[Enum]:
    """The imported Enum of this name; Enum itself, which has no members, if there is none."""
    waiting, seen = [Enum], set[type[Enum]]()
    while waiting:
        found = waiting.pop()
        if f"{found.__module__}:{found.__qualname__}" == named:
            return found
        fresh = [subclass for subclass in type.__subclasses__(found) if subclass not in seen]
        seen.update(fresh)
        waiting += fresh
    return Enum


def _factory_and_keys(_: Any, context: Data) -> list[Any]:
    factory = f"{context['default_factory_module'].text()}.{context['default_factory_name'].text()}"
    if factory not in _FACTORIES:
        context.refuse(f"the factory {factory[:100]!r} of a defaultdict is no plain container or number")
    return [_FACTORIES[factory], [_key(key) for key in context["dict_context"]]]


def _most_items(_: Any, context: Data) -> int | None:
    most = context.nested()
    found = None if most.value is None else most.integer()
    return most.malformed("a deque holds at least one item") if found is not None and found < 1 else found


def _registered_context(container: Any, context: Data) -> Any:
    """The context of a registered class, by the function that was registered with it."""
    if container is namedtuple or hasattr(container, "_fields"):
        found = _registered(context)
        return found if hasattr(found, "_fields") else context.malformed("it is no named tuple")
    from_dumpable = pytree.SUPPORTED_SERIALIZED_TYPES[container].from_dumpable_context
    if from_dumpable is None:
        return context.nested().plain()
    inner = context.nested() if isinstance(context.value, str) and context.value[:1] in ("[", "{") else context
    inner.plain()
    return from_dumpable(context.value)


_FACTORIES: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, frozenset, int, float, bool, str)},
    "collections.OrderedDict": OrderedDict,
    "collections.deque": deque,
}
_CONTEXTS: dict[Any, Callable[[Any, Data], Any]] = {
    **dict.fromkeys((tuple, list), lambda _, context: None),
    **dict.fromkeys((dict, OrderedDict), _keys),
    defaultdict: _factory_and_keys,
    deque: _most_items,
}
