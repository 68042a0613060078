"""Storages, version counters, views: snapshots of tensor memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from partita._torch.operators.schemas import storage_key
from partita.errors import RecomputeError

__all__ = [
    "StorageCopy",
    "base_of",
    "by_storage",
    "has_memory",
    "inner_tensors",
    "placements_of",
    "plain_tensors",
    "version_of",
    "wants_gradients",
]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# Copies of memory as it was, over which tensors can be made that look at it as others did.


@final
class StorageCopy:
    """One storage as it is now, bit for bit, and how each tensor of a group looks at it; the tensors are not held."""

    def __init__(self, group: Sequence[Tensor]) -> None:
        # A body may change shapes in place, and a write may make a tensor require gradients.
        self._looks = [_look(tensor) for tensor in group]
        self._first = min(range(len(group)), key=lambda place: _fitness(self._looks[place]))
        self._is_inference = group[0].is_inference()
        with torch.no_grad():
            #: The copy itself; None where whoever packs what is saved has it.
            self.memory: Tensor | None = _memory(group[self._first]).clone()
        _check_gradients(self._looks, self.memory.dtype)

    def differs(self, group: Sequence[Tensor]) -> bool:
        """Whether the memory of the group is not any more what it was."""
        assert self.memory is not None
        return hasattr(group[0], "fake_mode") or not torch.equal(_memory(group[self._first]), self.memory)

    def fresh(self, memory: Tensor) -> list[Tensor]:
        """Tensors like those of the group, in its order, over memory of their own with the values of `memory`."""
        # Autograd lets nobody write to a leaf, and a clone is none.
        with torch.inference_mode() if self._is_inference else torch.enable_grad():
            memory = memory.detach()
            if any(look.wants_gradients for look in self._looks):
                memory.requires_grad_()
            memory = memory.clone()
            found = [_seen(memory, look) for look in self._looks]
        # Outside of its mode an inference tensor can be written by more operators once it is detached.
        return [tensor.detach() for tensor in found] if self._is_inference else found


def by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """The tensors that share memory, by the number of their storage; each is there once."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        groups.setdefault(storage_key(tensor), []).append(tensor)
    return groups


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one storage: sparse and opaque ones are not."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return tensor.layout is torch.strided


def wants_gradients(tensor: Tensor) -> bool:
    """Whether a tensor requires gradients; one that may not be asked can only be read where nobody wants any."""
    if not tensor.requires_grad:
        return False
    try:
        _ = tensor.grad_fn
    except RuntimeError:  # A view that was written behind autograd's back.
        return False
    return True


class _Look(NamedTuple):
    """How a tensor looks at its memory."""

    dtype: torch.dtype
    geometry: tuple[Sequence[int], Sequence[int], int]
    is_conjugate: bool
    is_negative: bool
    wants_gradients: bool


def _look(tensor: Tensor) -> _Look:
    geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return _Look(tensor.dtype, geometry, tensor.is_conj(), tensor.is_neg(), wants_gradients(tensor))


def _fitness(look: _Look) -> tuple[bool, int]:
    """How badly a dtype serves a whole group: gradients pass through few changes of it, and small ones divide large."""
    return not look.wants_gradients, look.dtype.itemsize


def _memory(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor looks into, as numbers of its dtype."""
    tensor = tensor.detach()
    # What is lazily conjugate or negative would be resolved by a copy; what lies in memory is not.
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _seen(flat: Tensor, look: _Look) -> Tensor:
    """The memory as a tensor that looks at it so."""
    whole = _as_dtype(flat if look.wants_gradients else flat.detach(), look.dtype)
    found = whole.as_strided(*look.geometry)
    found = found.conj() if look.is_conjugate else found
    return torch._neg_view(found) if look.is_negative else found


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if flat.dtype == dtype:
        return flat
    ratio = max(1, dtype.itemsize // flat.dtype.itemsize)
    whole = flat[: len(flat) // ratio * ratio]
    return torch.view_as_complex(whole.unflatten(0, (-1, 2))) if _is_real_of(flat.dtype, dtype) else whole.view(dtype)


def _check_gradients(looks: Sequence[_Look], memory: torch.dtype) -> None:
    for look in looks:
        if look.wants_gradients and look.dtype != memory and not _is_real_of(memory, look.dtype):
            raise RecomputeError(
                f"a body that writes is given one memory as {look.dtype} and as {memory}, and gradients are wanted for "
                "both; give it a copy of one of them, or leave what writes out of the region"
            )


def _is_real_of(real: torch.dtype, dtype: torch.dtype) -> bool:
    return dtype.is_complex and dtype.to_real() == real


# Version counters: how often torch has written a tensor in place.


def version_of(tensor: Tensor) -> int | None:
    """The number of writes so far; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


# Views: what autograd remembers a tensor to be a part of.


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of; None if it is no view."""
    return tensor._base


# Tensors that wrap others, such as DTensor: their values and memory are those of the tensors inside.


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that a wrapper holds, by attribute; none for other tensors, nested ones among them."""
    wrapper: Any = tensor
    if tensor.is_nested or not is_traceable_wrapper_subclass(tensor):
        return {}
    if hasattr(wrapper, "trigger_wait"):  # The result of a collective, which may not be there yet.
        wrapper.trigger_wait()
    names, _ = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors in whose memory the values are: those inside a wrapper, at any depth, or the tensor itself."""
    inner = inner_tensors(tensor)
    return [plain for held in inner.values() for plain in plain_tensors(held)] if inner else [tensor]


def placements_of(tensor: Tensor) -> tuple[object, ...] | None:
    """How a DTensor is spread over which devices; None for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (*getattr(tensor, "placements", ()), mesh)
