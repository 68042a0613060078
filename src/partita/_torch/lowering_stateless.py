"""Modules without state: they take the tensors that they would hold as their first arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final
from weakref import ref

from torch import Tensor, nn

__all__ = ["HasPlace", "Stateless"]


class HasPlace(Protocol):
    """Where a module in a body holds a tensor."""

    @property
    def path(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def name(self) -> str: ...


@final
class Stateless(nn.Module):
    """A module that gets the tensors of `module` as its first arguments; threads may call it side by side."""

    def __init__(self, module: nn.Module, target: str, slots: Sequence[HasPlace]) -> None:
        super().__init__()
        self.slots = tuple(slots)
        self.training = module.training
        self._bare = _Bare(module, [(slot.path[len(target) + 1 :], slot.table, slot.name) for slot in slots])

    def forward(self, *given: Any, **named: Any) -> Any:
        count = len(self.slots)
        return self._bare.with_tensors(given[:count])(*given[count:], **named)


@final
class _Bare:
    """A module and all below it without their tensors; no submodule of anyone, so that nobody looks for state in it."""

    def __init__(self, module: nn.Module, places: Sequence[tuple[str, str, str]]) -> None:
        paths = dict(module.named_modules(remove_duplicate=False))
        number = {id(found): at for at, found in enumerate(dict.fromkeys(paths.values()))}
        self._modules = [_without_tensors(found) for found in dict.fromkeys(paths.values())]
        self._children = [
            [(name, number[id(child)]) for name, child in found._modules.items() if child is not None]
            for found in dict.fromkeys(paths.values())
        ]
        self._places = [(number[id(paths[path])], table, name) for path, table, name in places]

    def with_tensors(self, tensors: Sequence[Any]) -> nn.Module:
        """New modules that hold these tensors; those that were there before stay as they are."""
        copies = [_shallow(module) for module in self._modules]
        for module, children in zip(copies, self._children, strict=True):
            module._modules.update({name: copies[at] for name, at in children})
        for (at, table, name), tensor in zip(self._places, tensors, strict=True):
            found = vars(copies[at])
            (found if table == "__dict__" else found[table])[name] = tensor
        for module in copies:
            if isinstance(module, nn.RNNBase):
                _list_weights(module)
        return copies[0]


def _list_weights(module: nn.RNNBase) -> None:
    """Lists the weights of a recurrent module, as it does itself, with references to see whether they have changed."""
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    references = [None if weight is None else ref(weight) for weight in weights]
    module.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)


def _without_tensors(module: nn.Module) -> nn.Module:
    """A copy that keeps nothing of the model alive that it comes from: no tensors, no submodules, no hooks."""
    bare = _shallow(module)
    bare._modules.update(dict.fromkeys(bare._modules))
    vars(bare).update({name: table for name, table in vars(nn.Module()).items() if name.endswith("_hooks")})
    for table in (bare._parameters, bare._buffers, vars(bare)):
        table.update({name: None for name, value in table.items() if isinstance(value, Tensor)})
    if isinstance(bare, nn.RNNBase):
        bare.__dict__.update(_flat_weights=[], _flat_weight_refs=[])
    return bare


def _shallow(module: nn.Module) -> nn.Module:
    copied = object.__new__(type(module))
    copied.__dict__.update(vars(module))
    copied.__dict__.update({table: dict(vars(module)[table]) for table in ("_parameters", "_buffers", "_modules")})
    return copied
