"""Private state of nn.Module: hooks, a `forward` of the instance, a compiled call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.module import _has_any_global_hook

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


def has_only_export_hooks(module: nn.Module) -> bool:
    """Whether the only call overrides of a module are the hooks by which torch.export checks its inputs."""
    hooks = [hook for table in hooks_of(module) for hook in table.values()]
    is_plain = "forward" not in vars(module) and module._compiled_call_impl is None
    return is_plain and bool(hooks) and all(getattr(hook, "__module__", "") == "torch.export._unlift" for hook in hooks)


def has_fleeting_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks by which torch.export keeps it from being pickled."""
    hooks = (hook for table in hooks_of(module) for hook in table.values())
    return any(
        getattr(hook, "__module__", "") == "torch.export._unlift" and "<locals>" in getattr(hook, "__qualname__", "")
        for hook in hooks
    )


def drop_fleeting_hooks(module: nn.Module) -> None:
    """Removes the hooks that cannot be pickled, which are only for programs that take modules as inputs."""
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(table.items()):
            if "<locals>" in getattr(hook, "__qualname__", ""):
                # Others say by its number how it is called. The process that loads a pickle gives numbers out again.
                for numbered in (value for name, value in vars(module).items() if "_hook" in name):
                    if isinstance(numbered, dict):
                        numbered.pop(key, None)
    # These raise in torch, since the flag is fixed when a program is exported; they are bound to torch's own module.
    for name in ("train", "eval"):
        module.__dict__.pop(name, None)


def every_module_has_hooks() -> bool:
    """Whether hooks are registered that every module runs."""
    return bool(_has_any_global_hook())


def hooks_of(module: nn.Module) -> tuple[Mapping[Any, Any], ...]:
    """The tables of the hooks that a call of the module runs."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def call_overrides(module: nn.Module) -> str | None:
    """What a call of the module does beside running the code of its class, as text; None if nothing."""
    if any(hooks_of(module)):
        return "runs hooks"
    if "forward" in vars(module):
        return "has a forward of its own"
    return None if module._compiled_call_impl is None else "has a compiled call of its own"


def runs_its_graph(module: object) -> bool:
    """Whether a call runs a graph and nothing else: no hook, no `forward` of the instance, no compiled call."""
    return isinstance(module, GraphModule) and call_overrides(module) is None


class StandsForBody(nn.Module):
    """A module that runs something equivalent to its `body`, which holds the state."""

    body: GraphModule
