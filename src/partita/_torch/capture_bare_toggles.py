"""Toggles that a model calls without a block: in its own code, in a graph that it runs, or in one that Dynamo made."""

from __future__ import annotations

from typing import Any

from torch.amp.autocast_mode import autocast

from partita._torch import toggles
from partita._torch.capture_recorder import Recorder
from partita._torch.capture_swaps import Swap
from partita._torch.capture_telling import Action, told

__all__ = ["bare_toggle_swaps"]


def bare_toggle_swaps() -> list[Swap]:
    """The place where torch's tracer hears of toggles, which tells the recorder instead."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    return [told(PreDispatchTorchFunctionMode, "__torch_function__", _BareToggles().take)]


class _BareToggles:
    """The blocks of one capture that were entered by a function."""

    def __init__(self) -> None:
        self.entered: dict[Any, Any] = {}

    def take(
        self,
        recorder: Recorder,
        original: Action,
        mode: Any,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        named = kwargs or {}
        if function is toggles.SET_GRAD:
            return recorder.set_grad(*args, **named)
        if function is toggles.ENTER_AUTOCAST:
            # Torch's tracer writes the toggle and enters nothing, so that the dtypes inside are wrong.
            block = autocast(*args, **named)
            block.__enter__()
            handle = recorder.handles.get(block)
            self.entered[handle] = block
            return handle
        if function is toggles.EXIT_AUTOCAST and args[0] in self.entered:
            return self.entered.pop(args[0]).__exit__(None, None, None)
        return original(mode, function, types, args, named)
