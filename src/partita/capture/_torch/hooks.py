"""Hooks that a model registers while it is traced are refused: autograd calls them, and no graph can hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita.capture._torch.patching import Patch
from partita.capture._torch.recorder import listening_recorder
from partita.errors import CaptureError


def hook_patches() -> list[Patch]:
    """Patches of the methods that register a hook, which raise inside a model that is being captured."""
    return [
        Patch(Tensor, "register_hook", _refusing(Tensor.register_hook, "Tensor.register_hook")),
        Patch(
            Tensor,
            "register_post_accumulate_grad_hook",
            _refusing(Tensor.register_post_accumulate_grad_hook, "Tensor.register_post_accumulate_grad_hook"),
        ),
        Patch(
            saved_tensors_hooks,
            "__enter__",
            # Subclasses such as `save_on_cpu`, which only move saved tensors, change no values.
            _refusing(saved_tensors_hooks.__enter__, "saved_tensors_hooks", only=saved_tensors_hooks),
        ),
    ]


def _refusing(method: Callable[..., Any], name: str, *, only: type | None = None) -> Callable[..., Any]:
    @wraps(method)
    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        if listening_recorder() is None or (only is not None and type(self) is not only):
            return method(self, *args, **kwargs)
        raise CaptureError(
            f"it calls {name}, and no graph keeps a hook; register it outside of the model, on an input, a weight or "
            "a result, or write what it does as an operator with a gradient of its own (torch.library.custom_op)"
        )

    return register
