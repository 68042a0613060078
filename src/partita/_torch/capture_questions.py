"""Questions for the modes in force that a model asks while it is traced, which it may be told one thing or another on.

Torch's own code asks as well, all the time, and gets the plain truth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from partita._torch.capture_recorder import Recorder, listening_recorder
from partita._torch.capture_swaps import Swap

__all__ = ["question_swaps"]


def question_swaps() -> list[Swap]:
    """The functions that a model asks for modes by."""
    # Dynamo looks these functions up by name when it is imported, and keeps what it finds.

    answers = {
        "is_grad_enabled": _answer_grad,
        "is_autocast_enabled": _answer_autocast,
        "is_inference_mode_enabled": _answer_inference,
    }
    return [_asked(name, answer) for name, answer in answers.items()]


def _asked(name: str, answer: Callable[..., bool]) -> Swap:
    original = getattr(torch, name)

    @wraps(original)
    def question(*args: Any, **kwargs: Any) -> bool:
        truth: bool = original(*args, **kwargs)
        recorder = listening_recorder()
        if recorder is None or _is_torchs_own(sys._getframe(1).f_globals.get("__name__")):
            return truth
        return answer(recorder, truth, *args, **kwargs)

    # Dynamo, which traces the bodies of some operators, calls it then and there, as it does with torch's own.
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return Swap(torch, name, question)


def _is_torchs_own(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "partita")


def _answer_grad(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    recorder.asks_for_grad = True
    return truth


def _answer_autocast(recorder: Recorder, truth: bool, device_type: str = "cuda") -> bool:  # noqa: FBT001
    if recorder.open_autocasts[device_type]:
        return truth
    recorder.asks_for_autocast = True
    return recorder.says_autocast


def _answer_inference(recorder: Recorder, truth: bool) -> bool:  # noqa: FBT001
    return recorder.open_inference[-1] if recorder.open_inference else truth
