"""The state of the modules that a body calls, read anew for each call, so that it may be loaded, moved and written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.fx import GraphModule

__all__ = ["ModuleState", "Slot"]


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module in a body holds a tensor: which module, in which of its tables, under which name."""

    path: str
    table: str
    name: str


@final
class ModuleState:
    """The tensors and training flags of all modules that a body calls, as they were found; empty for most bodies."""

    def __init__(self, body: GraphModule) -> None:
        called = {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
        modules = {path: module for target in called for path, module in _modules_below(body, target)}
        self.slots = tuple(slot for path, module in modules.items() for slot in _slots_of(path, module))
        self._tables = [(_table(modules[slot.path], slot.table), slot.name) for slot in self.slots]
        self._modules = list(modules.values())
        self._links = [
            (body.get_submodule(path.rpartition(".")[0])._modules, path.rpartition(".")[2], module)
            for path, module in modules.items()
        ]
        self._counts = [
            (table, len(table)) for module in self._modules for table in (module._parameters, module._buffers)
        ]

    def read(self) -> list[Tensor | None]:
        """The tensors now, in the order of the slots."""
        return [table.get(name) for table, name in self._tables]

    @property
    def training(self) -> tuple[bool, ...]:
        """The training flags now."""
        return tuple([module.training for module in self._modules])

    @property
    def is_current(self) -> bool:
        """Whether the body still calls these modules, and they still hold as many tensors."""
        for table, name, module in self._links:
            if table.get(name) is not module:
                return False
        return all(len(table) == count for table, count in self._counts)

    def hooked(self) -> str | None:
        """The class of a module that runs a hook, if one does: a compiler would lose it."""
        return next((type(module).__name__ for module in self._modules if _has_hooks(module)), None)

    def __bool__(self) -> bool:
        return bool(self._modules)


def _modules_below(body: GraphModule, target: str) -> Iterator[tuple[str, nn.Module]]:
    for path, module in body.get_submodule(target).named_modules(remove_duplicate=False):
        yield (f"{target}.{path}" if path else target), module


def _slots_of(path: str, module: nn.Module) -> Iterator[Slot]:
    for table in ("_parameters", "_buffers", "__dict__"):
        held = _table(module, table).items()
        yield from (Slot(path, table, name) for name, value in held if isinstance(value, Tensor))


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    return module.__dict__ if name == "__dict__" else module.__dict__[name]


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
