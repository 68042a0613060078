"""The surroundings of a call: what compiled code must be made for, and when only the body itself will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from partita._torch.ambient import read_ambient
from partita._torch.tracing_state import Tracing, tracing_now

__all__ = ["Surroundings", "default_device", "profiler_runs", "surroundings", "watched"]

#: Whether a profiler wants to know what runs.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


class Surroundings(NamedTuple):
    """What decides, beside its inputs, what a body computes."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: bool

    @property
    def has_gradients(self) -> bool:
        """Whether a result may have a history."""
        return self.grad and not self.inference


def surroundings() -> Surroundings:
    """The surroundings now."""
    found = read_ambient()
    return Surroundings(
        found.grad,
        found.inference,
        tuple((device, dtype) for device, enabled, dtype in found.autocast if enabled),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )


def watched() -> bool:
    """Whether somebody watches or replaces every operator: a tracer, torch.func, forward-mode AD, modes of the user."""
    if _len_torch_dispatch_stack() > 0 and not all(map(_looks_elsewhere, _get_current_dispatch_mode_stack())):
        return True
    if _len_torch_function_stack() > 0 and default_device() is None:
        return True
    if torch._C._is_tracing() or forward_ad._current_level >= 0:
        return True
    return _functorch_level() is not None or tracing_now() is not Tracing.NOT


def _looks_elsewhere(mode: object) -> bool:
    """Whether a mode is the one of AOTAutograd that looks at custom operators in the first call of compiled code."""
    return type(mode).__name__ == "_AnalyzeCustomOpInputOutputMode" and type(mode).__module__.startswith("torch.")


def default_device() -> torch.device | None:
    """The device of new tensors; None where other modes than those that choose it may change what functions do."""
    if not all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack()):
        return None
    return torch.get_default_device()


def _functorch_level() -> Any:
    return torch._C._functorch.peek_interpreter_stack()
