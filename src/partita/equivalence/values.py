"""Values: whether two tensors hold the same numbers, and where they are furthest apart."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.graphs.tolerance import Tolerance

__all__ = ["value_difference"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_difference(before: Tensor, after: Tensor, tolerance: Tolerance) -> str | None:
    """What to say about the numbers of two tensors of one shape and dtype; None if there is nothing to say.

    Where the tolerance is exact every bit counts, so 0.0 is not -0.0; but any NaN equals any other NaN.
    """
    before, after = _readable(before), _readable(after).to(before.device)
    differing = _differing(before, after, tolerance)
    return _worst(before, after, differing) if bool(differing.any()) else None


def _readable(tensor: Tensor) -> Tensor:
    """The tensor as an ordinary one, whose elements can be viewed as bits."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _differing(before: Tensor, after: Tensor, tolerance: Tolerance) -> Tensor:
    if before.is_complex():
        pairs = _differing(torch.view_as_real(before), torch.view_as_real(after), tolerance)
        return pairs.any(-1)
    if not before.is_floating_point():
        return _bits(before) != _bits(after)
    if tolerance.relative or tolerance.absolute:
        wide_before, wide_after = _wide(before), _wide(after)
        limits = _limits(before, tolerance)
        return ~torch.isclose(wide_after, wide_before, equal_nan=True, **limits)
    differing = _bits(before) != _bits(after)
    # Only a NaN can differ in bits and still count as equal, so most comparisons end here.
    return differing & ~(_wide(before).isnan() & _wide(after).isnan()) if bool(differing.any()) else differing


def _limits(before: Tensor, tolerance: Tolerance) -> dict[str, float]:
    """The distances that are allowed; in half precision and below, some units of the numbers themselves at least.

    There the step from one number to the next is wider than a tolerance for single precision, so one rounding that
    falls the other way would never be forgiven.
    """
    unit = torch.finfo(before.dtype).eps
    if unit <= torch.finfo(torch.float32).eps or not before.numel():
        return {"rtol": tolerance.relative, "atol": tolerance.absolute}
    largest = float(_wide(before).abs().nan_to_num(posinf=0.0).max())
    return {"rtol": max(tolerance.relative, 4 * unit), "atol": max(tolerance.absolute, unit * largest)}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _wide(tensor: Tensor) -> Tensor:
    """8-bit floats have next to no operators of their own."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def _worst(before: Tensor, after: Tensor, differing: Tensor) -> str:
    wide = torch.complex128 if before.is_complex() else torch.float64
    one, other = before[differing], after[differing]
    gaps = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    place = int(gaps.argmax())
    index = tuple(differing.nonzero()[place].tolist())
    at = f" at {index}" if index else ""
    pair = f"{one[place].item()} != {other[place].item()}"
    return f"max |difference| {gaps[place].item():g}{at}: {pair} ({one.numel()} of {before.numel()} elements differ)"
