"""A mode scope: the grad, inference and autocast state that a body runs under, set around a call and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

__all__ = ["ModeScope"]


@final
@dataclass(frozen=True, slots=True)
class ModeScope:
    """What is set; None, or no entry for a device, means: as the caller has it.

    An entry for autocast holds the arguments of `torch.autocast`: device type, dtype, enabled, cache_enabled.
    """

    grad: bool | None = None
    inference: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None, bool, bool | None], ...] = ()

    @property
    def as_traced(self) -> ModeScope:
        """The same as a tracer can follow it: inference tensors cannot be traced, so gradients are off instead."""
        if self.inference is None:
            return self
        return replace(self, grad=False if self.inference else self.grad, inference=None)

    def call(self, function: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        """What `function` gives in this scope; nested calls, since Dynamo follows no stack of contexts."""
        if self.inference is not None:
            with torch.inference_mode(self.inference):
                return replace(self, inference=None).call(function, inputs)
        if self.grad is not None:
            with torch.set_grad_enabled(self.grad):
                return replace(self, grad=None).call(function, inputs)
        if self.autocast:
            with torch.autocast(*self.autocast[0]):
                return replace(self, autocast=self.autocast[1:]).call(function, inputs)
        return function(inputs)
