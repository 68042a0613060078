"""What a thread has on torch's stacks, read and put back: function and dispatch modes, and hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

#: Dynamo does not trace this module: its code runs around bodies, after a graph break.
DYNAMO_SKIPS = True

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def active_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """The active saved tensor hooks; None if there are none."""
    found: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def restore_saved_tensor_hooks(found: tuple[Pack, Unpack] | None) -> None:
    """Removes the hooks that were set since `found` were the active ones; sets those again that were removed."""
    while (active := active_saved_tensor_hooks()) is not None and active != found:
        # The innermost hooks are removed, whoever has set them.
        saved_tensors_hooks(*active).__exit__()
    if found is not None and active is None:
        saved_tensors_hooks(*found).__enter__()


with torch.device("cpu"):
    #: The function mode of a default device.
    DEVICE_MODE = type(_get_current_function_mode_stack()[-1])


def function_modes() -> tuple[Any, ...]:
    """The active function modes, outermost first, without those of default devices."""
    return tuple(mode for mode in _get_current_function_mode_stack() if type(mode) is not DEVICE_MODE)


def dispatch_modes() -> tuple[Any, ...]:
    """The active dispatch modes, outermost first."""
    return tuple(_get_current_dispatch_mode_stack())


def restore_modes(read: Callable[[], Sequence[Any]], found: Sequence[Any]) -> None:
    """Leaves the modes that were entered since `found` was read, and enters those again that were left."""
    active = read()
    same = next((n for n, pair in enumerate(zip(active, found, strict=False)) if pair[0] is not pair[1]), None)
    kept = min(len(active), len(found)) if same is None else same
    for mode in reversed(active[kept:]):
        mode.__exit__(None, None, None)
    for mode in found[kept:]:
        mode.__enter__()
