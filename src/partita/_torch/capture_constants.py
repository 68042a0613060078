"""Real tensors that a trace comes upon: those that are neither arguments nor in the state of the model.

The tracer works on stand-ins for arguments and state, but computes with the tensors themselves where it finds others,
so that a model which writes to one has changed it when the trace is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.nn import Parameter

from partita._torch.versions import version_of

__all__ = ["Constants"]


class Constants:
    """The tensors that one trace has come upon, with what was in them then."""

    def __init__(self) -> None:
        self.found: dict[int, _Found] = {}
        #: Whether one of them has gradients: a program has such tensors without.
        self.has_lost_gradients = False

    def meet(self, constant: Any) -> None:
        """Takes note of what is in a tensor, before the operator that reads or writes it runs."""
        from torch.utils._python_dispatch import _disable_current_modes

        # Subclasses are stand-ins of the tracer, or wrap one.
        if type(constant) not in (Tensor, Parameter) or id(constant) in self.found or is_wrapped(constant):
            return
        self.has_lost_gradients |= constant.requires_grad and torch.is_grad_enabled()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            copied = constant.detach().clone()
        self.found[id(constant)] = _Found(constant, version_of(constant), copied)

    def restore(self) -> None:
        """Puts back what was in the tensors that the trace has written to."""
        for found in self.found.values():
            if version_of(found.tensor) != found.version:
                found.tensor.detach().copy_(found.before)


@dataclass(frozen=True, slots=True)
class _Found:
    tensor: Tensor
    version: int | None
    before: Tensor
