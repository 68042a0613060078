"""Memory of tensors: storages, version counters, views, and the tensors inside wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory; on a CPU torch raises an error that has no class of its own (torch 2.13)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("[enforce fail at alloc_cpu.cpp")


def wants_gradients(tensor: Tensor) -> bool:
    """Whether a tensor requires gradients; False where autograd has invalidated it as a view."""
    if not tensor.requires_grad:
        return False
    try:
        _ = tensor.grad_fn
    except RuntimeError:  # A view whose base was mutated in a way that autograd does not support.
        return False
    return True


def may_repeat_elements(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory; False is certain."""
    if 0 in sizes:
        return False
    reached = 0
    pairs = [(stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    # By strides alone: to compare symbolic sizes would add guards.
    for stride, size in sorted(pairs, key=itemgetter(0)):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def unexpanded(tensor: Tensor) -> Tensor:
    """Each element once: without the repetitions of an expanded tensor, which cannot be written."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(axis, 0, min(tensor.shape[axis], 1))
    return tensor


def is_within_storage(tensor: Tensor) -> bool:
    """Whether its storage has all of its elements: a tensor that torch failed to resize has its new size (torch 2.13).

    To read one that has not ends the process.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    try:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
        return bool((last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # A nested tensor, or a wrapper without memory of its own.
        return True


def version_of(tensor: Tensor) -> int | None:
    """The version counter: how often a tensor was mutated in-place; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of; None if it is no view."""
    return tensor._base


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors inside a wrapper such as DTensor, by attribute; none for other tensors, nested ones included."""
    wrapper: Any = tensor
    if tensor.is_nested or not hasattr(wrapper, "__tensor_flatten__"):
        return {}
    if hasattr(wrapper, "trigger_wait"):  # The result of a collective, which may not be there yet.
        wrapper.trigger_wait()
    names, _ = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that store the values: those inside a wrapper, at any depth, or the tensor itself."""
    inner = inner_tensors(tensor)
    return [plain for held in inner.values() for plain in plain_tensors(held)] if inner else [tensor]


def stored_parts(tensor: Tensor) -> dict[str, Tensor]:
    """What a sparse or a quantized tensor stores, by what reads it: indices and values, scales and zero points."""
    if tensor.layout is torch.sparse_coo:
        # Without the underscore it refuses a tensor that is not coalesced, as `values()` does.
        values = {"values()": tensor.values()} if tensor.is_coalesced() else {}
        return {"indices()": tensor._indices(), **values}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        return {"crow_indices()": rows, "col_indices()": columns, "values()": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        columns, rows = tensor.ccol_indices(), tensor.row_indices()
        return {"ccol_indices()": columns, "row_indices()": rows, "values()": tensor.values()}
    quantization = quantization_of(tensor)
    if quantization is None:
        return {}
    if len(quantization) > 1:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return {"q_per_channel_scales()": scales, "q_per_channel_zero_points()": zeros}
    scale = torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu")
    return {"q_scale()": scale, "q_zero_point()": torch.tensor(tensor.q_zero_point(), device="cpu")}


def quantization_of(tensor: Tensor) -> tuple[object, ...] | None:
    """The scheme of a quantized tensor and, if each slice along an axis has a scale of its own, that axis."""
    if not tensor.is_quantized:
        return None
    try:
        scheme = tensor.qscheme()
    except RuntimeError:  # Made by torch.empty, which gives it no scale.
        return None
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (scheme,)
    return scheme, f"axis {tensor.q_per_channel_axis()}"


def placements_of(tensor: Tensor) -> tuple[object, ...] | None:
    """How a DTensor is spread over which devices; None for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (*getattr(tensor, "placements", ()), mesh)
