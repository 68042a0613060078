"""Inference blocks of a model that is being traced: written as toggles, and traced without gradients instead.

Torch's tracer does not see such a block at all, and inside one it cannot make the tensors that it works with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import has_side_effect

from partita._torch import toggles
from partita._torch.capture_recorder import Recorder, listening_recorder
from partita._torch.capture_swaps import Swap

__all__ = ["inference_block_swaps"]


def inference_block_swaps() -> list[Swap]:
    """The guard that every inference block makes, in Python and in generated code."""
    for toggle in (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE):
        # Else torch takes them out of the bodies of operators, since nobody reads what they return.
        has_side_effect(toggle)
    guard = torch._C._InferenceMode

    def make(mode: bool = True) -> Any:  # noqa: FBT001, FBT002
        recorder = listening_recorder()
        return guard(mode) if recorder is None else _RecordedGuard(recorder, mode)

    return [Swap(torch._C, "_InferenceMode", make)]


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
