"""Naming the state of a rewritten module: by where things went, or as the original called them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from partita.errors import OptionError
from partita.graphs.state_keys import StateKeys

__all__ = ["StateNaming", "name_state"]

StateNaming = Literal["split", "original"]


def name_state(module: nn.Module, keys: StateKeys, *, naming: StateNaming) -> None:
    """Lets `module` save and load its state under the original's names, where `naming` asks for that."""
    if naming not in ("split", "original"):
        raise OptionError(f'state_names is "split" or "original", not {naming!r}')
    _forget_renaming(module)
    if naming == "original" and keys.moved:
        module.register_state_dict_post_hook(_Saving(keys))
        module.register_load_state_dict_pre_hook(_Loading(keys))


@dataclass
class _Saving:
    """A hook that renames what a module has just put into a state dict; torch writes a flag on it, so it is open."""

    keys: StateKeys

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        own = {key: value for key, value in state.items() if key.startswith(prefix)}
        for key in own:
            del state[key]
        for key, value in own.items():
            state[prefix + self.keys.original(key[len(prefix) :])] = value


@dataclass
class _Loading:
    """A hook that renames what a module is about to take from a state dict."""

    keys: StateKeys

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        own = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        renamed = self.keys.from_original(own, _own_keys(module))
        for key in own:
            del state[prefix + key]
        state.update({prefix + key: value for key, value in renamed.items()})


def _own_keys(module: nn.Module) -> dict[str, None]:
    """The names under which the module itself looks for its state; duplicates are asked for one by one."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return dict.fromkeys(names)


def _forget_renaming(module: nn.Module) -> None:
    """Takes back the renaming of an earlier rewrite, which the new keys include."""
    tables: tuple[Mapping[int, Any], ...] = (module._state_dict_hooks, module._load_state_dict_pre_hooks)
    for table in tables:
        assert isinstance(table, dict)
        ours = [key for key, hook in table.items() if isinstance(getattr(hook, "hook", hook), _Saving | _Loading)]
        for key in ours:
            del table[key]
