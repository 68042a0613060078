"""No_grad, autocast and inference_mode while a model is traced."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.autocast_mode import autocast
from torch.fx import Node
from torch.fx.node import has_side_effect

from partita._torch import toggles
from partita.capture._torch.patching import Action, Patch, recorded_patch
from partita.capture._torch.recorder import Recorder, listening_recorder

__all__ = ["autocast_block_swaps", "bare_toggle_swaps", "grad_block_swaps", "inference_block_swaps"]


# Autocast blocks of a model that is being traced: written with the arguments that the user gave.
#
# The tracer switches the cache of cast weights off, and a block fills in what its user left open with the state that
# it finds. Neither belongs in the graph.


def autocast_block_swaps() -> list[Patch]:
    """The methods of autocast, which tell the recorder."""
    blocks = _Blocks()
    return [
        recorded_patch(autocast, "__init__", blocks.make),
        recorded_patch(autocast, "__enter__", blocks.enter),
        recorded_patch(autocast, "__exit__", blocks.leave),
    ]


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of a block, and the dtype that the blocks around asked for where it was made."""

    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None
    around: torch.dtype | None


class _Blocks:
    """The autocast blocks of one capture."""

    def __init__(self) -> None:
        self.given: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()
        self.open: WeakKeyDictionary[Any, tuple[Node | None, torch.dtype | None]] = WeakKeyDictionary()
        #: By device: the dtype that the open blocks ask for; None is that of the caller.
        self.dtypes: dict[str, torch.dtype | None] = {}

    def make(self, recorder: Recorder, original: Action, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        named = signature(original).bind(block, *args, **kwargs)
        named.apply_defaults()
        _, device, dtype, enabled, cache = named.args
        self.given[block] = _Given(dtype, bool(enabled), cache, self.dtypes.get(_device_type(device)))

    def enter(self, recorder: Recorder, original: Action, block: Any) -> Any:
        with recorder.silence():
            entered = original(block)
        device = _device_type(block.device)
        before = self.dtypes.get(device)
        given = self.given.get(block)
        if given is None:  # It was made before the trace, and has kept what it found then.
            given = _Given(block.fast_dtype, block._enabled, block._cache_enabled, before)
        dtype = given.dtype
        if dtype is None and given.around != before:
            dtype = given.around
            if dtype is None:
                recorder.problems.append(
                    f"an autocast block on {device!r} takes its dtype from the caller, since it was made outside the "
                    f"block for {before} that it is entered in"
                )
        handle = recorder.write(toggles.ENTER_AUTOCAST, device, dtype, given.enabled, given.cache)
        if handle is not None:
            recorder.handles[block] = handle
        self.open[block] = (handle, before)
        recorder.open_autocasts[device] += 1
        self.dtypes[device] = before if dtype is None else dtype
        return entered

    def leave(self, recorder: Recorder, original: Action, block: Any, *raised: Any) -> Any:
        with recorder.silence():
            left = original(block, *raised)
        # A block that was entered again while it was open remembers only the last time: leaving it once more does
        # nothing, in torch as here.
        device = _device_type(block.device)
        handle, before = self.open.pop(block, (None, self.dtypes.get(device)))
        self.dtypes[device] = before
        if handle is not None:
            recorder.write(toggles.EXIT_AUTOCAST, handle)
            recorder.open_autocasts[device] -= 1
        return left


def _device_type(device: str) -> str:
    """The type of a device that a block is for: torch takes "cpu:0" as well."""
    return torch.device(device).type


# Toggles that a model calls without a block: in its own code, in a graph that it runs, or in one that Dynamo made.


def bare_toggle_swaps() -> list[Patch]:
    """The place where torch's tracer hears of toggles, which tells the recorder instead."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    return [recorded_patch(PreDispatchTorchFunctionMode, "__torch_function__", _BareToggles().take)]


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


# Grad blocks of a model that is being traced: leaving one puts back what was there, not what the trace found there.


def grad_block_swaps() -> list[Patch]:
    """The methods of no_grad, enable_grad and set_grad_enabled, which tell the recorder."""
    by_value = torch.set_grad_enabled
    return [
        recorded_patch(torch.no_grad, "__enter__", _enter_no_grad),
        recorded_patch(torch.enable_grad, "__enter__", _enter_enable_grad),
        *(recorded_patch(block, "__exit__", _leave) for block in (torch.no_grad, torch.enable_grad, by_value)),
        recorded_patch(by_value, "__init__", _make_by_value),
        recorded_patch(by_value, "__enter__", _enter_by_value),
        recorded_patch(by_value, "__call__", _decorate_by_value),
    ]


def _enter_no_grad(recorder: Recorder, original: Action, block: Any) -> None:
    with recorder.silence():
        original(block)
    _ask(recorder, block)
    recorder.write(toggles.SET_GRAD, False)


def _enter_enable_grad(recorder: Recorder, original: Action, block: Any) -> None:
    with recorder.silence():
        original(block)
    _ask(recorder, block)
    recorder.write(toggles.SET_GRAD, True)


def _leave(recorder: Recorder, original: Action, block: Any, *raised: Any) -> None:
    with recorder.silence():
        original(block, *raised)
    _put_back(recorder, block)


def _make_by_value(recorder: Recorder, original: Action, block: Any, *args: Any, **kwargs: Any) -> None:
    # It switches as soon as it is made; called as a function, without `with`, nothing puts the mode back.
    with recorder.silence():
        original(block, *args, **kwargs)
    _ask(recorder, block)
    recorder.set_grad(block.mode)


def _enter_by_value(recorder: Recorder, original: Action, block: Any) -> None:
    recorder.set_grad(block.mode)


def _decorate_by_value(recorder: Recorder, original: Action, block: Any, function: Any) -> Any:
    with recorder.silence():
        decorated = original(block, function)
    _put_back(recorder, block)
    return decorated


def _ask(recorder: Recorder, block: Any) -> None:
    asked = recorder.write(toggles.IS_GRAD_ENABLED)
    if asked is not None:
        recorder.handles[block] = asked


def _put_back(recorder: Recorder, block: Any) -> None:
    asked = recorder.handles.get(block)
    if asked is not None:
        recorder.write(toggles.SET_GRAD, asked)
    else:  # The block was made before the trace, and has kept the value that it found then.
        recorder.set_grad(block.prev)


# Inference blocks of a model that is being traced: written as toggles, and traced without gradients instead.
#
# Torch's tracer does not see such a block at all, and inside one it cannot make the tensors that it works with.


def inference_block_swaps() -> list[Patch]:
    """The guard that every inference block makes, in Python and in generated code."""
    for toggle in (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE):
        # Else torch takes them out of the bodies of operators, since nobody reads what they return.
        has_side_effect(toggle)
    guard = torch._C._InferenceMode

    def make(mode: bool = True) -> Any:  # noqa: FBT001, FBT002
        recorder = listening_recorder()
        return guard(mode) if recorder is None else _RecordedGuard(recorder, mode)

    return [Patch(torch._C, "_InferenceMode", make)]


class _RecordedGuard:
    """Stands in for torch's guard while a model is traced."""

    def __init__(self, recorder: Recorder, mode: bool) -> None:  # noqa: FBT001
        self._recorder, self._mode = recorder, mode
        self._handle: Node | None = None
        self._grad_before = False

    def __enter__(self) -> None:
        self._grad_before = torch.is_grad_enabled()
        self._handle = self._recorder.write(toggles.ENTER_INFERENCE, self._mode)
        self._recorder.open_inference.append(self._mode)
        # The block sets the grad mode as well.
        self._set_grad(not self._mode)

    def __exit__(self, *raised: Any) -> None:
        if self._handle is not None:
            self._recorder.write(toggles.EXIT_INFERENCE, self._handle)
            self._recorder.open_inference.pop()
        self._handle = None
        self._set_grad(self._grad_before)

    def __del__(self) -> None:
        # Torch's guard puts the modes back when it goes, left or not.
        if self._handle is not None:
            self.__exit__()

    def _set_grad(self, enabled: bool) -> None:  # noqa: FBT001
        with self._recorder.silence():
            torch._C._set_grad_enabled(enabled)
