"""Memory of tensors: storages and copies of them, version counters, views, and the tensors inside wrappers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from partita._torch.operators.schemas import storage_key
from partita.errors import RecomputeError

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory; on a CPU torch raises an error that has no class of its own (torch 2.13)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("[enforce fail at alloc_cpu.cpp")


@final
class StorageCopy:
    """A bitwise copy of one storage, and how each tensor of a group views it; the tensors are not kept alive."""

    def __init__(self, group: Sequence[Tensor]) -> None:
        # A body may change shapes in-place, and a mutation may make a tensor require gradients.
        self._views = [_view_of(tensor) for tensor in group]
        # The dtype for the whole group: gradients pass few conversions, and small items divide large ones.
        ranks = [(not view.wants_gradients, view.dtype.itemsize) for view in self._views]
        self._first = ranks.index(min(ranks))
        self._is_inference = group[0].is_inference()
        with torch.no_grad():
            #: The copy itself; None once saved-tensor hooks have packed it.
            self.memory: Tensor | None = _memory(group[self._first]).clone()
        _check_gradients(self._views, self.memory.dtype)

    def differs(self, group: Sequence[Tensor]) -> bool:
        """Whether the memory of the group was mutated since."""
        assert self.memory is not None
        return hasattr(group[0], "fake_mode") or not torch.equal(_memory(group[self._first]), self.memory)

    def fresh(self, memory: Tensor) -> list[Tensor]:
        """Tensors like those of the group, in its order, over memory of their own with the values of `memory`."""
        # Autograd forbids in-place operations on leaves, and a clone is not a leaf.
        with torch.inference_mode() if self._is_inference else torch.enable_grad():
            memory = memory.detach()
            if any(view.wants_gradients for view in self._views):
                memory.requires_grad_()
            if (whole := self._whole_copy(memory)) is not None:
                return [whole]
            memory = memory.clone()
            found = [_tensor_over(memory, view) for view in self._views]
        # Outside of inference mode, more operators can mutate an inference tensor once it is detached.
        return [tensor.detach() for tensor in found] if self._is_inference else found

    def _whole_copy(self, memory: Tensor) -> Tensor | None:
        """A copy that is no view, if one tensor has all of the memory: torch refuses `detach_` of a view."""
        view, *others = self._views
        shape, _, offset = view.geometry
        if others or self._is_inference or offset != 0 or math.prod(shape) != len(memory) or not view.is_plain(memory):
            return None
        tensor = _tensor_over(memory, view)
        copied = tensor.clone()
        return copied if copied.stride() == tensor.stride() else None


def by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """The tensors grouped by storage, without duplicates."""
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
    """Whether a tensor requires gradients; False where autograd has invalidated it as a view."""
    if not tensor.requires_grad:
        return False
    try:
        _ = tensor.grad_fn
    except RuntimeError:  # A view whose base was mutated in a way that autograd does not support.
        return False
    return True


class _View(NamedTuple):
    """How a tensor views its storage."""

    dtype: torch.dtype
    geometry: tuple[Sequence[int], Sequence[int], int]
    is_conjugate: bool
    is_negative: bool
    wants_gradients: bool

    def is_plain(self, memory: Tensor) -> bool:
        """Whether the values are those that the memory contains."""
        return self.dtype == memory.dtype and not self.is_conjugate and not self.is_negative


def _view_of(tensor: Tensor) -> _View:
    geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return _View(tensor.dtype, geometry, tensor.is_conj(), tensor.is_neg(), wants_gradients(tensor))


def _memory(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as a flat tensor of its dtype."""
    tensor = tensor.detach()
    # A copy would resolve lazy conjugation and negation, which the memory does not contain.
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = torch.ops.aten._neg_view.default(tensor) if tensor.is_neg() else tensor
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _tensor_over(flat: Tensor, view: _View) -> Tensor:
    """A tensor that views flat memory so."""
    whole = _as_dtype(flat if view.wants_gradients else flat.detach(), view.dtype)
    found = whole.as_strided(*view.geometry)
    found = found.conj() if view.is_conjugate else found
    return torch.ops.aten._neg_view.default(found) if view.is_negative else found


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if flat.dtype == dtype:
        return flat
    ratio = max(1, dtype.itemsize // flat.dtype.itemsize)
    whole = flat[: len(flat) // ratio * ratio]
    return torch.view_as_complex(whole.unflatten(0, (-1, 2))) if _is_real_of(flat.dtype, dtype) else whole.view(dtype)


def _check_gradients(views: Sequence[_View], memory: torch.dtype) -> None:
    for view in views:
        if view.wants_gradients and view.dtype != memory and not _is_real_of(memory, view.dtype):
            raise RecomputeError(
                f"a body with mutations has inputs that view one storage as {view.dtype} and as {memory}, and both "
                "require gradients; pass a copy of one of them, or exclude the mutations from the region"
            )


def _is_real_of(real: torch.dtype, dtype: torch.dtype) -> bool:
    return dtype.is_complex and dtype.to_real() == real


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


def placements_of(tensor: Tensor) -> tuple[object, ...] | None:
    """How a DTensor is spread over which devices; None for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (*getattr(tensor, "placements", ()), mesh)
