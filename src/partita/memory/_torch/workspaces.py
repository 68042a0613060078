"""What libraries allocate on a GPU beside the results of operators: inside of kernels, and once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita._torch.symbolic_shapes import hint_of

#: cuBLAS workspaces of the threads of forward and backward, which are made at the first step.
LIBRARY_BYTES = 67_200_000


def workspace_bytes(target: Any, args: Sequence[Any], result: Any) -> int:
    """What the kernel of an operator allocates inside on a GPU, and frees again; by its values, traced or real."""
    if target is _aten.convolution.default:
        return _convolution_workspace(args[1], args[0], result)
    if target is _aten.convolution_backward.default:
        return _convolution_workspace(args[2], args[0], args[1])
    name = str(target)
    return _attention_workspace(result) if "attention" in name and "backward" in name else 0


def _attention_workspace(result: Any) -> int:
    """Flash attention's backward sums in float32."""
    values = result if isinstance(result, tuple | list) else (result,)
    largest = max((one for one in values if isinstance(one, Tensor)), key=_count, default=None)
    return 4 * _count(largest) if largest is not None and largest.device.type == "cuda" else 0


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
