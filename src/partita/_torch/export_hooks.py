"""Hooks that torch.export puts on the module of a program."""

from __future__ import annotations

from torch import nn

from partita._torch.interposed import hooks_of

__all__ = ["drop_fleeting_hooks", "has_only_export_hooks"]


def has_only_export_hooks(module: nn.Module) -> bool:
    """Whether a module has the hooks by which torch.export checks its inputs, and nothing else that a call runs."""
    hooks = [hook for table in hooks_of(module) for hook in table.values()]
    is_plain = "forward" not in vars(module) and module._compiled_call_impl is None
    return is_plain and bool(hooks) and all(getattr(hook, "__module__", "") == "torch.export._unlift" for hook in hooks)


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
