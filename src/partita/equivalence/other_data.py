"""Other values of the same kind for the tensors of a call, and which of them a program refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from partita._torch.tensors import plain_tensors, stored_parts, unexpanded

T = TypeVar("T")


def fill_with_other_data(leaves: Sequence[object]) -> list[Tensor]:
    """Fills tensors of one storage with other values; those that keep theirs, since no others are known to be valid.

    All move by one along their longest axis, so that each column of indices keeps its range, and rows of a mask keep
    some elements. Floats shrink by a quarter, and change signs where both occur; sorted integers stay sorted.
    """
    distinct = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    # The largest first, since most others are views of it.
    tensors = sorted(distinct, key=lambda tensor: -tensor.numel())
    found = [(tensor, _read(tensor) if len(tensors) > 1 else None) for tensor in tensors]
    return [tensor for tensor, before in found if not _is_other(tensor, before) and not _fill_all(tensor)]


def has_data(leaf: object) -> bool:
    """Whether a leaf is a tensor with elements that can be read."""
    return isinstance(leaf, Tensor) and any(tensor.numel() and not tensor.is_meta for tensor in plain_tensors(leaf))


def refused(groups: Sequence[T], accepts: Callable[[Sequence[T]], bool]) -> list[T]:
    """The groups without which all others are accepted together, found by halving."""
    taken: list[T] = []
    out: list[T] = []

    def sort(some: Sequence[T]) -> None:
        if accepts([*taken, *some]):
            taken.extend(some)
        elif len(some) == 1:
            out.extend(some)
        else:
            sort(some[: len(some) // 2])
            sort(some[len(some) // 2 :])

    sort(groups)
    return out


def _fill_all(leaf: Tensor) -> bool:
    """Whether a tensor has other values now, or had none."""
    parts = _filled_parts(leaf)
    filled = [_fill(part) for part in parts]
    return any(filled) or not any(part.numel() for part in parts)


def _filled_parts(leaf: Tensor) -> list[Tensor]:
    """The tensors that hold the values of a leaf: those inside a wrapper, the values of a sparse or nested one."""
    found: list[Tensor] = []
    for tensor in (plain.detach() for plain in plain_tensors(leaf)):
        if tensor.is_nested:
            found += [tensor.values()] if tensor.layout is torch.jagged else tensor.unbind()
        elif tensor.layout is torch.strided:
            found.append(tensor)
        else:
            found.append(stored_parts(tensor).get("values()", tensor))
    return [tensor for tensor in found if not tensor.is_meta]


def _read(leaf: Tensor) -> list[Tensor]:
    return [_once(part).clone() for part in _filled_parts(leaf)]


def _is_other(leaf: Tensor, before: Sequence[Tensor] | None) -> bool:
    """Whether a tensor has other values than before; False where this is not known."""
    if before is None:
        return False
    try:
        pairs = zip(before, map(_once, _filled_parts(leaf)), strict=True)
        return not all(_same(one, other) for one, other in pairs)
    except Exception:  # Types without operators, code of a subclass.
        return False


def _once(tensor: Tensor) -> Tensor:
    return unexpanded(tensor) if tensor.layout is torch.strided else tensor


def _fill(tensor: Tensor) -> bool:
    """Whether a tensor could be given other values."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    try:
        once = _once(tensor)
        before = once.dequantize() if once.is_quantized else once
        other = _other_values(before)
        if other is None or _same(other.to(before.dtype), before):
            return False
        once.copy_(other)
    except Exception:  # Elements that overlap in memory, types without operators, code of a subclass.
        return False
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _other_values(tensor: Tensor) -> Tensor | None:
    if tensor.is_floating_point() or tensor.is_complex():
        return _other_floats(tensor)
    if tensor.dtype is torch.bool:
        moved = _moved(tensor)
        return _with_last(tensor, ~tensor) if moved is None else moved
    return _other_integers(tensor)


def _other_floats(tensor: Tensor) -> Tensor:
    """Probabilities stay between 0 and 1, additive masks and logarithms of probabilities below 0."""
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit floats have few operators.
    moved = _moved(wide)
    if moved is None:
        steps = torch.linspace(0.75, 0.5, wide.numel(), device=wide.device).reshape(wide.shape)
        return (steps if not bool(wide.any()) else wide * steps).to(wide.dtype)
    return moved * (-0.75 if _may_change_sign(wide) else 0.75)


def _may_change_sign(tensor: Tensor) -> bool:
    if tensor.is_complex() or not bool((tensor > 0).any()) or not bool((tensor < 0).any()):
        return False
    # The least of all numbers masks something, and the largest would not.
    return bool(tensor.abs().max() < torch.finfo(tensor.dtype).max / 2)


def _moved(tensor: Tensor) -> Tensor | None:
    """The elements moved by one along the longest axis along which they differ; None if all are the same."""
    for axis in sorted(range(tensor.ndim), key=lambda axis: (-tensor.shape[axis], -axis)):
        moved = tensor.roll(1, axis)
        if not _same(moved, tensor):
            return moved
    return None


def _other_integers(tensor: Tensor) -> Tensor | None:
    first = int(tensor.flatten()[0])
    if bool((tensor == first).all()):
        wide = tensor.to(torch.int64)
        # A smaller index is one of the same table; whether 1 is one if 0 is, the program says, if it can:
        # on a GPU a wrong index ends the process.
        if first > 0:
            return _with_last(wide, wide - 1)
        return _with_last(wide, wide + 1) if first == 0 and tensor.device.type == "cpu" else None
    if tensor.ndim == 1 and bool(((wide := tensor.to(torch.int64)).diff() >= 0).all()):
        return _other_offsets(wide, tensor.dtype)
    return _moved(tensor)


def _other_offsets(offsets: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Increasing integers with other steps between them.

    They may be offsets, and kernels read out of bounds where these decrease, or end elsewhere.
    """
    steps = offsets.diff()
    for others in (steps.flip(0), steps.roll(1)):
        if not torch.equal(others, steps):
            return torch.cat([offsets[:1], offsets[:1] + others.cumsum(0)])
    # All steps are of one size.
    first, step, found = int(offsets[0]), int(steps[0]), offsets.clone()
    if step > 1 and len(steps) > 1:
        found[1] -= 1
        return found
    if first > 0:
        found[0] -= 1
        return found
    # Places are counted by 1; offsets only if each sequence has one element, and they are mostly 32-bit integers.
    return offsets.roll(1) if step == 1 and dtype is torch.int64 else None


def _with_last(tensor: Tensor, others: Tensor) -> Tensor:
    """The tensor with the last of its elements along the longest axis from the other one."""
    found = tensor.clone()
    if not tensor.ndim:
        return others
    axis = max(range(tensor.ndim), key=lambda axis: (tensor.shape[axis], axis))
    last = tensor.shape[axis] - 1
    found.select(axis, last).copy_(others.select(axis, last))
    return found
