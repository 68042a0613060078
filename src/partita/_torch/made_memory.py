"""What memory a function makes, seen on tensors that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.dry_runs import Allowance, is_torchs, refusal_of_call
from partita._torch.schemas import storage_key

__all__ = ["tensors_made"]


def tensors_made(function: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> list[Tensor] | None:
    """A tensor for each storage that a call on fake tensors makes; None where that is not known."""
    if not is_torchs(function) or refusal_of_call(function, args, kwargs) is not None:
        return None
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    modes = {id(mode): mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None}
    if len(modes) != 1:
        return None
    (fake_mode,) = modes.values()
    try:
        with fake_mode, torch.enable_grad(), _Seeing(allowance) as seen:
            function(*args, **kwargs)
    except Exception:  # A function may refuse tensors without memory in any way.
        return None
    given = set(map(storage_key, leaves))
    return [tensor for key, tensor in seen.found.items() if key not in given]


class _Seeing(TorchDispatchMode):
    def __init__(self, allowance: Allowance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowance = allowance
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._allowance.spend(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.found.setdefault(storage_key(leaf), leaf)
        return result
