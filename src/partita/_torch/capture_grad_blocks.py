"""Grad blocks of a model that is being traced: leaving one puts back what was there, not what the trace found there."""

from __future__ import annotations

from typing import Any

import torch

from partita._torch import toggles
from partita._torch.capture_recorder import Recorder
from partita._torch.capture_swaps import Swap
from partita._torch.capture_telling import Action, told

__all__ = ["grad_block_swaps"]


def grad_block_swaps() -> list[Swap]:
    """The methods of no_grad, enable_grad and set_grad_enabled, which tell the recorder."""
    by_value = torch.set_grad_enabled
    return [
        told(torch.no_grad, "__enter__", _enter_no_grad),
        told(torch.enable_grad, "__enter__", _enter_enable_grad),
        *(told(block, "__exit__", _leave) for block in (torch.no_grad, torch.enable_grad, by_value)),
        told(by_value, "__init__", _make_by_value),
        told(by_value, "__enter__", _enter_by_value),
        told(by_value, "__call__", _decorate_by_value),
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
