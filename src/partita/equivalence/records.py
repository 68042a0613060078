"""Records of tensors and other leaves: what is compared of each, copied where its memory will be restored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita._torch.tensors import (
    inner_tensors,
    is_within_storage,
    placements_of,
    quantization_of,
    stored_parts,
)
from partita.equivalence.ambient import state_of
from partita.equivalence.state import storage_key
from partita.equivalence.values import is_array


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The properties of a tensor, and its values detached from any graph."""

    type: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    inference: bool
    #: Whether a bit of the tensor conjugates or negates the values in memory.
    conjugate: bool
    negative: bool
    value: Tensor
    #: The placements of a DTensor.
    placements: tuple[object, ...] | None = None
    #: The inner tensors of a wrapper subclass, which hold its values.
    inner: tuple[tuple[str, TensorRecord], ...] = ()
    #: Of a sparse tensor whether it is coalesced, and how many of its axes are sparse.
    coalesced: bool | None = None
    sparse_dim: int | None = None
    #: The scheme of a quantized tensor, and the axis along which its scales lie.
    quantization: tuple[object, ...] | None = None
    #: What a sparse or quantized tensor stores: indices and values, scales and zero points.
    parts: tuple[tuple[str, TensorRecord], ...] = ()


def record_of(leaf: object, *, restored: frozenset[int]) -> object:
    """The record of a leaf; values are copied only if their memory will be `restored`."""
    state = state_of(leaf)
    if state is not None:
        leaf = state if isinstance(state, Tensor) else str(state)
    if is_array(leaf):
        return _array_record(leaf)
    if isinstance(leaf, bytearray | set):
        return leaf.copy()
    return tensor_record(leaf, restored) if isinstance(leaf, Tensor) else leaf


def _array_record(array: Any) -> object:
    """The record of a copy of an array; a copy of the array itself where torch has no such dtype."""
    array = array.copy()
    try:
        return replace(tensor_record(torch.from_numpy(array)), type=type(array).__name__)
    except TypeError:
        return array


def tensor_record(tensor: Tensor, restored: frozenset[int] = frozenset()) -> TensorRecord:
    """The record of a tensor; its values are copied only if their memory will be `restored`."""
    value = _rows(tensor.detach()) if tensor.is_nested else tensor.detach()
    strided = tensor.layout is torch.strided and not tensor.is_nested
    inner = tuple((name, tensor_record(inner, restored)) for name, inner in inner_tensors(tensor).items())
    is_copied = not inner and storage_key(tensor) in restored and is_within_storage(value)
    is_sparse = tensor.layout is torch.sparse_coo
    return TensorRecord(
        type=type(tensor).__name__,
        dtype=tensor.dtype,
        shape=value.shape,
        stride=_normalized_strides(tensor) if strided else None,
        device=tensor.device,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        inference=tensor.is_inference(),
        conjugate=strided and tensor.is_conj(),
        negative=strided and tensor.is_neg(),
        value=value.clone() if is_copied else value,
        placements=placements_of(tensor),
        inner=inner,
        coalesced=tensor.is_coalesced() if is_sparse else None,
        sparse_dim=tensor.sparse_dim() if is_sparse else None,
        quantization=quantization_of(tensor),
        parts=tuple((name, tensor_record(part)) for name, part in stored_parts(value).items()),
    )


def _rows(nested: Tensor) -> Tensor:
    """The lengths and values of a nested tensor's rows in one tensor, since its own shape is symbolic."""
    rows = nested.unbind()
    lengths = torch.tensor([size for row in rows for size in row.shape], device=nested.device)
    return torch.cat([lengths.to(nested.dtype), *(row.flatten() for row in rows)])


def _normalized_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, with 0 along axes of one element or none, where strides have no meaning."""
    empty = tensor.numel() == 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if empty or size == 1 else stride for size, stride in pairs)
