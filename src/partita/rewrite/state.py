"""State: putting what one module holds on another, without copying a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from partita._torch.blank_modules import blank_module

__all__ = ["adopt_hooks", "is_persistent", "place", "share_plain_attributes", "share_state"]

_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OWN_KEYS = frozenset(nn.Module().__dict__) | {
    "_graph",
    "_code",
    "_lineno_map",
    "_prologue_start",
    "_tracer_cls",
    "_tracer_extras",
    "_replace_hooks",
    "_create_node_hooks",
    "_erase_node_hooks",
    "_deepcopy_hooks",
    "_is_impure",
    "_restores_grad",
    "_restores_modes",
    "_is_part",
    # These would run in the place of the new graph.
    "forward",
    "_compiled_call_impl",
    # Dynamo's: it promises AOTAutograd a source on every placeholder, which new nodes do not have.
    "_param_name_to_source",
    "meta",
    "shape_env",
}


def place(root: nn.Module, path: str, value: Any, *, persistent: bool = True) -> None:
    """Registers `value` on `root` under a dotted path, with plain modules on the way."""
    *folders, name = path.split(".")
    module = root
    for folder in folders:
        inner = module._modules.get(folder)
        if inner is None:
            inner = module._modules[folder] = blank_module(training=root.training)
        module = inner
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    elif isinstance(value, nn.Module):
        module._modules[name] = value
    elif isinstance(value, torch.Tensor):
        module.register_buffer(name, value, persistent=persistent)
    else:
        module.__dict__[name] = value


def is_persistent(root: nn.Module, path: str) -> bool:
    """Whether the buffer at `path` is saved with the module."""
    folder, _, name = path.rpartition(".")
    return name not in root.get_submodule(folder)._non_persistent_buffers_set


def share_state(source: nn.Module, target: nn.Module, *, without: frozenset[str], room_for: Iterable[str] = ()) -> None:
    """Gives `target` all state of `source` at the same paths, but for the modules at the paths in `without`.

    Tensors and whole submodules are shared. Only a module with something taken out of it becomes a plain container, and
    one that something will be put into, at a path in `room_for`: what is shared is never written.
    """
    opened = {path[:at] for path in (*without, *room_for) for at, letter in enumerate(path) if letter == "."}
    _share(source, target, "", without, opened)


def _share(source: nn.Module, target: nn.Module, prefix: str, without: frozenset[str], opened: set[str]) -> None:
    target._parameters.update(source._parameters)
    target._buffers.update(source._buffers)
    target._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        path = f"{prefix}{name}"
        if path in without:
            continue
        if child is not None and path in opened:
            container = blank_module(training=child.training)
            _share(child, container, f"{path}.", without, opened)
            target._modules[name] = container
        else:
            target._modules[name] = child
    share_plain_attributes(source, target)


def share_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    """Gives `target` what else hangs on `source`: hooks of exported modules, for one, read such attributes."""
    for name, value in source.__dict__.items():
        if name not in _OWN_KEYS and name not in target.__dict__:
            target.__dict__[name] = value


def adopt_hooks(source: nn.Module, target: nn.Module) -> None:
    """Gives `target` the hooks of `source`, in tables of its own."""
    for name in _HOOKS:
        getattr(target, name).update(getattr(source, name))
    target._is_full_backward_hook = source._is_full_backward_hook
