"""Equality of single values that are no tensors: by type and by bits, or unknown."""

from __future__ import annotations

import enum
import math
import struct
import sys
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType, NoneType, NotImplementedType
from typing import Any, TypeAlias

import torch

from partita._torch.symbolic_shapes import SYMBOLIC
from partita.analysis.tolerance import EXACT, Tolerance

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size)
_VALUES = (
    *(NoneType, bool, int, float, complex, str, bytes, bytearray, range, slice, EllipsisType, NotImplementedType),
    *(enum.Enum, type, set, frozenset),
    *(*_FUNCTIONS, *_TORCH_VALUES, *SYMBOLIC),
)

#: None where two values can be neither distinguished nor called equal.
Verdict: TypeAlias = bool | None


def is_value(value: object) -> bool:
    """Whether a value is compared as a whole, by an equality that can be trusted."""
    return isinstance(value, _VALUES) or is_array(value)


def is_array(value: object) -> bool:
    """Whether a value is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def has_equality(value: object) -> bool:
    """Whether the type of a value says itself what is equal, other than by identity."""
    return getattr(type(value), "__eq__", None) is not object.__eq__


def same(before: Any, after: Any, tolerance: Tolerance) -> Verdict:
    """Whether two values of one type are the same; numbers by their bits unless within the tolerance."""
    if isinstance(before, float | complex):
        within = tolerance.absolute + tolerance.relative * abs(before)
        return (tolerance != EXACT and abs(before - after) <= within) or _bits(before) == _bits(after)
    if before is after:
        return True
    if isinstance(before, FunctionType):
        # Functions that are made anew by every call, from one definition, may differ in what they close over.
        return None if before.__code__ is after.__code__ else False
    if isinstance(before, type):
        return False
    if isinstance(before, set | frozenset):
        return _same_sets(before, after)
    if is_array(before):
        return _same_arrays(before, after)
    if not isinstance(before, _VALUES) and not has_equality(before):
        return None
    try:
        equal = bool(before == after)
    except Exception:  # An equality that compares tensors, for example; any error of the user's code.
        return None
    # slice(1) equals slice(True), and differs from it in its text.
    return equal and (not isinstance(before, slice | torch.Size) or repr(before) == repr(after))


def _bits(number: float | complex) -> tuple[bytes, ...]:
    """The bits of a number, any NaN for every other."""
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return tuple(struct.pack("d", math.nan if math.isnan(part) else part) for part in parts)


def _same_sets(before: Any, after: Any) -> Verdict:
    if len(before) != len(after):
        return False
    if {_typed(member) for member in before} == {_typed(member) for member in after}:
        return True
    # Members without an equality of their own may be made anew by every call.
    by_identity = any(not is_value(member) and not has_equality(member) for member in (*before, *after))
    return None if by_identity else False


def _typed(member: Any) -> object:
    if isinstance(member, tuple):
        return (type(member), tuple(map(_typed, member)))
    if isinstance(member, frozenset):
        return (type(member), frozenset(map(_typed, member)))
    return (type(member), _bits(member) if isinstance(member, float | complex) else member)


def _same_arrays(before: Any, after: Any) -> Verdict:
    """Arrays that torch cannot hold: of texts, records or objects."""
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if not before.dtype.hasobject:
        return bool(before.tobytes() == after.tobytes())
    verdicts = [
        type(one) is type(other) and same(one, other, EXACT) for one, other in zip(before.flat, after.flat, strict=True)
    ]
    return False if False in verdicts else None if None in verdicts else True
