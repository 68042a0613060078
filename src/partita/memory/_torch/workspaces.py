"""Workspaces: what kernels allocate inside on a GPU, and libraries once; part of the predicted peak of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita._torch.symbolic_shapes import hint_of

#: cuBLAS workspaces of the threads of forward and backward, which are made at the first step.
LIBRARY_BYTES = 65 << 20


def workspace_bytes(target: Any, args: Sequence[Any], result: Any) -> int:
    """What the kernel of an operator allocates inside on a GPU, and frees again; by its values, traced or real."""
    if target is _aten.convolution.default:
        return _convolution_workspace(args[1], args[0], result)
    if target is _aten.convolution_backward.default:
        return _convolution_workspace(args[2], args[0], args[1])
    if target is _aten.sum.dim_IntList:
        return _sum_workspace(args[0], result)
    name = str(target)
    return _attention_workspace(result) if "attention" in name and "backward" in name else 0


def _attention_workspace(result: Any) -> int:
    """The backward of fused attention sums in float32: the gradient of the queries, and a number for each of them."""
    values = result if isinstance(result, tuple | list) else (result,)
    largest = max((one for one in values if isinstance(one, Tensor)), key=_count, default=None)
    if largest is None or largest.device.type != "cuda" or not largest.dim():
        return 0
    return 4 * (_count(largest) + _count(largest) // max(int(hint_of(largest.shape[-1])), 1))


def _sum_workspace(read: Any, result: Any) -> int:
    """Sums over rows, such as gradients of biases, where torch splits them among many blocks of threads.

    Each block leaves a partial sum in float32 for all of its threads. torch 2.11 to 2.13 choose the blocks so.
    """
    if not isinstance(read, Tensor) or read.device.type != "cuda" or not read.is_contiguous():
        return 0
    outputs = _count(result)
    rows = _count(read) // max(outputs, 1)
    if not outputs or read.shape[-1] != outputs or read.element_size() > 4:
        return 0  # Sums over other dims, or in double precision.
    device = torch.cuda.get_device_properties(read.device)
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    threads, lanes = _BLOCK // vector, _power_of_two(outputs // vector)
    height = min(_power_of_two(rows), threads // min(lanes, _WARP))
    width = min(lanes, threads // height)
    values = -(-rows // height) if rows >= min(height * _FEWEST, _MOST) else 0
    columns = -(-outputs // vector // width)
    grid = device.multi_processor_count * (device.max_threads_per_multi_processor // (width * height))
    if values < _MOST or columns > grid:
        return 0
    splits = max(min(-(-grid // columns), -(-values // _FEWEST)), -(-values // _MOST))
    return 4 * outputs * splits * width * vector if splits > 1 else 0


#: Threads of a block and of a warp, and the fewest and the most values for each thread.
_BLOCK, _WARP, _FEWEST, _MOST = 512, 32, 16, 256


def _power_of_two(number: int) -> int:
    """The largest power of two up to `number`, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _convolution_workspace(filters: Any, *images: Any) -> int:
    """cuDNN copies images that are not in channels-last order, unless the convolution is a product of matrices."""
    if not all(isinstance(one, Tensor) and one.device.type == "cuda" for one in (filters, *images)):
        return 0
    layout = _CHANNELS_LAST.get(images[0].dim())
    is_last = layout is not None and images[0].is_contiguous(memory_format=layout)
    is_product = all(size == 1 for size in filters.shape[2:])
    return 0 if is_last or is_product else sum(_count(one) * one.element_size() for one in images)


_aten: Any = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _count(value: Tensor) -> int:
    return int(hint_of(value.numel()))
