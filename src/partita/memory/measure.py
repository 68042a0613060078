"""The measured memory peak of a training step: of its storages on a CPU, by the allocator's statistics on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from partita.memory._torch.recorder import Recorder, on_one_thread


def measured_peak(step: Callable[[], object], allocated: Iterable[Tensor] = ()) -> int:
    """Runs `step` once; the most bytes that were allocated meanwhile.

    On a CPU these are the storages that operators return, and those of `allocated`, the tensors that exist before:
    parameters, buffers and arguments; what a kernel allocates and frees inside is not seen. If one of `allocated` is on
    a GPU, they are what torch's allocator has given out on that GPU, whatever for.
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
    recorder = Recorder()
    recorder.count(tensors)
    with on_one_thread(), recorder:
        step()
    return recorder.record.peak
