"""What stands between a call of a module and the code of its class: hooks, a `forward` of its own, a compiled call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["HOOKS_OF_ALL", "hooks_of", "interposed"]

#: The hooks that every module runs.
HOOKS_OF_ALL: tuple[Mapping[Any, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def hooks_of(module: nn.Module) -> tuple[Mapping[Any, Any], ...]:
    """The tables of the hooks that a call of the module runs."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def interposed(module: nn.Module) -> str | None:
    """What a call of the module does beside running the code of its class, in words; None if nothing."""
    if any(hooks_of(module)):
        return "runs hooks"
    if "forward" in vars(module):
        return "has a forward of its own"
    return None if module._compiled_call_impl is None else "has a compiled call of its own"
