"""Hooks that torch.export puts on the module of a program."""

from __future__ import annotations

from torch import nn

__all__ = ["drop_fleeting_hooks"]


def drop_fleeting_hooks(module: nn.Module) -> None:
    """Takes off the hooks that cannot be pickled, which only serve programs that take modules as inputs."""
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(table.items()):
            if "<locals>" in getattr(hook, "__qualname__", ""):
                for known in (table, module._forward_hooks_always_called, module._forward_hooks_with_kwargs):
                    known.pop(key, None)
    # These raise in torch, since the flag is fixed when a program is exported; they are bound to torch's own module.
    for name in ("train", "eval"):
        module.__dict__.pop(name, None)
