"""no_grad, autocast and inference_mode blocks, and unscoped toggles, of a model that is traced.

Patched methods report to the recorder, which writes each block as toggles with the arguments that the user passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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


def autocast_block_patches() -> list[Patch]:
    """Patches of the methods of autocast.

    The tracer disables the cache of cast weights, and a block takes unspecified arguments from the current state.
    Neither belongs in the graph.
    """
    blocks = _Blocks()
    return [
        recorded_patch(autocast, "__init__", blocks.make),
        recorded_patch(autocast, "__enter__", blocks.enter),
        recorded_patch(autocast, "__exit__", blocks.leave),
    ]


@dataclass(frozen=True, slots=True)
class _BlockArguments:
    """The arguments of a block, and the dtype that the enclosing blocks set where it was constructed."""

    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None
    outer_dtype: torch.dtype | None


class _Blocks:
    """The autocast blocks of one capture."""

    def __init__(self) -> None:
        self.arguments: WeakKeyDictionary[Any, _BlockArguments] = WeakKeyDictionary()
        self.open: WeakKeyDictionary[Any, tuple[Node | None, torch.dtype | None]] = WeakKeyDictionary()
        #: By device: the dtype that the open blocks set; None is that of the caller.
        self.dtypes: dict[str, torch.dtype | None] = {}

    def make(self, recorder: Recorder, original: Action, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        named = signature(original).bind(block, *args, **kwargs)
        named.apply_defaults()
        _, device, dtype, enabled, cache = named.args
        self.arguments[block] = _BlockArguments(dtype, bool(enabled), cache, self.dtypes.get(_device_type(device)))

    def enter(self, recorder: Recorder, original: Action, block: Any) -> Any:
        with recorder.silence():
            entered = original(block)
        device = _device_type(block.device)
        before = self.dtypes.get(device)
        arguments = self.arguments.get(block)
        if arguments is None:  # Constructed before the trace, with the state that it found then and has set now.
            enabled, cache = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
            arguments = _BlockArguments(block.fast_dtype, enabled, cache, before)
        dtype = arguments.dtype
        if dtype is None and arguments.outer_dtype != before:
            dtype = arguments.outer_dtype
            if dtype is None:
                recorder.problems.append(
                    f"an autocast block on {device!r} takes its dtype from the caller, since it was made outside the "
                    f"block for {before} that it is entered in"
                )
        handle = recorder.write(toggles.ENTER_AUTOCAST, device, dtype, arguments.enabled, arguments.cache)
        if handle is not None:
            recorder.handles[block] = handle
        self.open[block] = (handle, before)
        recorder.open_autocasts[device] += 1
        self.dtypes[device] = before if dtype is None else dtype
        return entered

    def leave(self, recorder: Recorder, original: Action, block: Any, *raised: Any) -> Any:
        with recorder.silence():
            left = original(block, *raised)
        # A block that was entered twice remembers only the last entry: leaving it a second time does nothing, in torch
        # as here.
        device = _device_type(block.device)
        handle, before = self.open.pop(block, (None, self.dtypes.get(device)))
        self.dtypes[device] = before
        if handle is not None:
            recorder.write(toggles.EXIT_AUTOCAST, handle)
            recorder.open_autocasts[device] -= 1
        return left


def _device_type(device: str) -> str:
    """The device type of a block: torch accepts "cpu:0" as well."""
    return torch.device(device).type


def unscoped_toggle_patches() -> list[Patch]:
    """Patches the method by which torch's tracer intercepts toggles that are called without a block.

    They come from the model itself, from a graph that it runs, or from one that Dynamo has made.
    """
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    return [recorded_patch(PreDispatchTorchFunctionMode, "__torch_function__", _UnscopedToggles().on_call)]


class _UnscopedToggles:
    """The blocks of one capture that were entered by a toggle."""

    def __init__(self) -> None:
        self.entered: dict[Any, Any] = {}

    def on_call(
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


def grad_block_patches() -> list[Patch]:
    """Patches of the methods of no_grad, enable_grad and set_grad_enabled.

    Leaving a block restores the mode at its entry, not the constant that the trace saw there.
    """
    by_value = torch.set_grad_enabled
    return [
        recorded_patch(torch.no_grad, "__enter__", partial(_enter, enabled=False)),
        recorded_patch(torch.enable_grad, "__enter__", partial(_enter, enabled=True)),
        *(recorded_patch(block, "__exit__", _leave) for block in (torch.no_grad, torch.enable_grad, by_value)),
        recorded_patch(by_value, "__init__", _make_by_value),
        recorded_patch(by_value, "__enter__", lambda recorder, original, block: recorder.set_grad(block.mode)),
        recorded_patch(by_value, "__call__", _decorate_by_value),
    ]


def _enter(recorder: Recorder, original: Action, block: Any, *, enabled: bool) -> None:
    with recorder.silence():
        original(block)
    _query(recorder, block)
    recorder.write(toggles.SET_GRAD, enabled)


def _leave(recorder: Recorder, original: Action, block: Any, *raised: Any) -> None:
    with recorder.silence():
        original(block, *raised)
    _restore(recorder, block)


def _make_by_value(recorder: Recorder, original: Action, block: Any, *args: Any, **kwargs: Any) -> None:
    # It switches the mode on construction; called as a function, without `with`, nothing restores it.
    with recorder.silence():
        original(block, *args, **kwargs)
    _query(recorder, block)
    recorder.set_grad(block.mode)


def _decorate_by_value(recorder: Recorder, original: Action, block: Any, function: Any) -> Any:
    with recorder.silence():
        decorated = original(block, function)
    _restore(recorder, block)
    return decorated


def _query(recorder: Recorder, block: Any) -> None:
    query = recorder.write(toggles.IS_GRAD_ENABLED)
    if query is not None:
        recorder.handles[block] = query


def _restore(recorder: Recorder, block: Any) -> None:
    query = recorder.handles.get(block)
    if query is not None:
        recorder.write(toggles.SET_GRAD, query)
    else:  # The block was constructed before the trace, with the mode that it found then.
        recorder.set_grad(block.prev)


def inference_block_patches() -> list[Patch]:
    """Patches the guard that every inference block constructs, in Python and in generated code.

    Torch's tracer does not see such a block, and cannot create its tensors inside one. So the block is written as
    toggles, and its operators are traced without gradients.
    """
    for toggle in (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE):
        # Otherwise dead-code elimination removes them from the bodies of operators, since their results are unused.
        has_side_effect(toggle)
    guard = torch._C._InferenceMode

    def make(mode: bool = True) -> Any:  # noqa: FBT001, FBT002
        recorder = listening_recorder()
        return guard(mode) if recorder is None else _RecordedGuard(recorder, mode)

    return [Patch(torch._C, "_InferenceMode", make)]


class _RecordedGuard:
    """Replaces torch's guard while a model is traced."""

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
        # Torch's guard restores the modes when it is destroyed, exited or not.
        if self._handle is not None:
            self.__exit__()

    def _set_grad(self, enabled: bool) -> None:  # noqa: FBT001
        with self._recorder.silence():
            torch._C._set_grad_enabled(enabled)
