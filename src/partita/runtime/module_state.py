"""The modules that a body calls as they are now: their tensors, read anew for each call, and whether they have changed.

Tensors may be loaded, moved and written. Whatever else changes, an option, a hook or a submodule, makes another state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.body_keys import modules_key, settings_of
from partita._torch.interposed import HOOKS_OF_ALL, hooks_of, interposed

__all__ = ["ModuleLook", "ModuleState", "Slot"]


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module in a body holds a tensor: which module, in which of its tables, under which name."""

    path: str
    table: str
    name: str


class ModuleLook(NamedTuple):
    """The modules of a body as one call finds them; `training` are their training flags."""

    state: ModuleState
    training: tuple[bool, ...]


@final
class ModuleState:
    """All modules that a body calls, as they were found; none for most bodies."""

    def __init__(self, body: GraphModule) -> None:
        called = {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
        modules = {path: module for target in called for path, module in _modules_below(body, target)}
        self._body = body
        self._modules = list(modules.values())
        self.slots = tuple(slot for path, module in modules.items() for slot in _slots_of(path, module))
        self._tables = [_table(modules[slot.path], slot.table) for slot in self.slots]
        self._names = [slot.name for slot in self.slots]
        #: Whether the body still calls these modules, and nothing but tensors and training flags has changed.
        self.is_current = _Stamp(body, modules).holds

    def read(self) -> list[Tensor | None]:
        """The tensors now, in the order of the slots."""
        return list(map(dict.get, self._tables, self._names))

    def look(self) -> ModuleLook:
        """What a call finds now."""
        return ModuleLook(self, tuple([module.training for module in self._modules]))

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Equal to that of another state if the same code can be made for both."""
        return modules_key(self._body)

    @cached_property
    def interposed(self) -> str | None:
        """Which module does what a compiler would lose, and what, in words; None if none does."""
        if any(HOOKS_OF_ALL):
            return "every module runs hooks"
        found = ((type(module).__name__, interposed(module)) for module in self._modules)
        return next((f"a {name} in it {reason}" for name, reason in found if reason is not None), None)

    def __bool__(self) -> bool:
        return bool(self._modules)


@final
class _Stamp:
    """What tells that modules have changed; it is asked in every call, so it takes a few microseconds at most."""

    def __init__(self, body: GraphModule, modules: Mapping[str, nn.Module]) -> None:
        self._modules = list(modules.values())
        self._types = list(map(type, self._modules))
        held = [*_places_of(body, modules), *(entry for module in self._modules for entry in _held_by(module))]
        self._held = [(holder.get, name, value) for holder, name, value in held]
        tables = [*HOOKS_OF_ALL, *(table for module in self._modules for table in _tables_of(module))]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._counts = list(map(len, self._filled))
        containers = (value for _, _, value in held if isinstance(value, list | dict))
        self._containers = [(container, _contents(container)) for container in containers]

    def holds(self) -> bool:
        if any(self._empty) or list(map(len, self._filled)) != self._counts:
            return False
        for get, name, value in self._held:
            if get(name) is not value:
                return False
        for container, before in self._containers:
            now = _contents(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return list(map(type, self._modules)) == self._types


def _contents(container: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(container) if isinstance(container, list) else [*container, *container.values()]


def _places_of(body: GraphModule, modules: Mapping[str, nn.Module]) -> Iterator[tuple[dict[str, Any], str, object]]:
    for path, module in modules.items():
        folder, _, name = path.rpartition(".")
        yield body.get_submodule(folder)._modules, name, module


def _held_by(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, object]]:
    """The options of a module, and the places where it has no tensor or submodule, but might."""
    if isinstance(module, GraphModule):
        yield from ((vars(module), name, vars(module).get(name)) for name in _OF_GRAPH_MODULES)
    else:
        yield from ((vars(module), name, value) for name, value in settings_of(module) if not isinstance(value, Tensor))
    for table in (module._parameters, module._buffers, module._modules):
        yield from ((table, name, None) for name, value in table.items() if value is None)


_OF_GRAPH_MODULES = ("_graph", "forward", "_compiled_call_impl")


def _tables_of(module: nn.Module) -> Iterator[Mapping[Any, Any]]:
    yield from hooks_of(module)
    yield from (module._parameters, module._buffers, module._modules)
    if not isinstance(module, GraphModule):  # One whose code is made when it is first called keeps notes on itself.
        yield vars(module)


def _modules_below(body: GraphModule, target: str) -> Iterator[tuple[str, nn.Module]]:
    for path, module in body.get_submodule(target).named_modules(remove_duplicate=False):
        yield (f"{target}.{path}" if path else target), module


def _slots_of(path: str, module: nn.Module) -> Iterator[Slot]:
    for table in ("_parameters", "_buffers", "__dict__"):
        held = _table(module, table).items()
        yield from (Slot(path, table, name) for name, value in held if isinstance(value, Tensor))


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    return module.__dict__ if name == "__dict__" else module.__dict__[name]
