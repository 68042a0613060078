"""The measured memory peak of a training step: of its storages on a CPU, by the allocator's statistics on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from partita.memory._torch.recorder import Recorder, on_one_thread


class _RecorderOfCompiled(Recorder):
    """Records compiled functions as they run, while Dynamo would run the uncompiled ones under other modes.

    FSDP frees gathered parameters by resizing their storages, which no operator shows.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_resized()
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def measured_peak(step: Callable[[], object], allocated: Iterable[Tensor] = ()) -> int:
    """Runs `step` once; the most bytes that were allocated meanwhile.

    On a CPU these are the storages that operators return, and those of `allocated`, the tensors that exist before:
    parameters, buffers and arguments; what a kernel allocates and frees inside is not seen. Functions that Inductor has
    compiled call kernels without operators, so that their results are not seen either; those of `aot_eager` are.
    If one of `allocated` is on a GPU, they are what torch's allocator has given out on that GPU, whatever for.
    """
    tensors = list(allocated)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if devices:
        (device,) = devices
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    recorder = _RecorderOfCompiled()
    recorder.count(tensors)
    with on_one_thread(), recorder:
        step()
    return recorder.record.peak
