"""Differences: two observations of the same call, one of each program, and what is not the same in them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from partita._torch.ambient import Ambient
from partita.equivalence.ambient import Settings
from partita.equivalence.findings import Difference
from partita.equivalence.observation import Moment, Named, Observation, Raised, TensorRecord
from partita.equivalence.values import value_difference
from partita.graphs.tolerance import EXACT, Tolerance

__all__ = ["differences"]

_PROPERTIES = (
    "type",
    "dtype",
    "shape",
    "stride",
    "device",
    "layout",
    "requires_grad",
    "inference",
    "conjugate",
    "negative",
    "placements",
)
#: Autograd chooses how it lays out a gradient, and a gradient is a leaf of its own.
_GRADIENT_PROPERTIES = ("dtype", "shape", "device", "layout")
#: What else there is to a tensor inside another is told of the other.
_INNER_PROPERTIES = ("type", "dtype", "shape", "device", "layout")


def differences(before: Observation, after: Observation, tolerance: Tolerance) -> Iterator[Difference]:
    """Everything that differs, what matters most first."""
    yield from _raised(before.raised, after.raised, "the call")
    if before.raised is None and after.raised is None:
        yield from _structures(before.structure, after.structure, "output")
        yield from _leaves(before.outputs, after.outputs, tolerance)
        yield from _homes(before, after)
        yield from _gradients(before, after, tolerance)
    if (before.raised is None) == (after.raised is None):
        yield from _structures(before.input_structure, after.input_structure, "the inputs after the call")
        yield from _leaves(_after_the_call(before.inputs), _after_the_call(after.inputs), tolerance)
        yield from _leaves(before.state, after.state, tolerance)
        yield from _replaced(before.state, after.state)
    for one, other in zip(before.moments, after.moments, strict=False):
        yield from _modes(one, other)
        yield from _settings(one, other)
        yield from _random_states(one, other)
    yield from _undeclared(before, after)


def _raised(before: Raised | None, after: Raised | None, where: str) -> Iterator[Difference]:
    if (before and before.type) is not (after and after.type):
        one, other = (str(error) if error else "no exception" for error in (before, after))
        yield Difference("exception", where, f"{one} != {other}")


def _structures(before: object, after: object, where: str) -> Iterator[Difference]:
    if before != after:
        yield Difference("structure", where, f"{_in_one_line(before)} != {_in_one_line(after)}")


def _in_one_line(structure: object) -> str:
    return " ".join(str(structure).split())


def _after_the_call(inputs: Named) -> Named:
    return tuple((f"{name} after the call", leaf) for name, leaf in inputs)


def _leaves(before: Named, after: Named, tolerance: Tolerance) -> Iterator[Difference]:
    ones, others = dict(before), dict(after)
    for name, one in ones.items():
        if name in others:
            yield from _leaf(one, others[name], name, tolerance)


def _replaced(before: Named, after: Named) -> Iterator[Difference]:
    """State in whose place only one of the programs has put another tensor; both show all state that may be written."""
    ones, others = dict(before), dict(after)
    for name in [*(name for name in ones if name not in others), *(name for name in others if name not in ones)]:
        which = "the original" if name in ones else "the other program"
        yield Difference("identity", name, f"only {which} puts another tensor in its place")


def _leaf(before: object, after: object, where: str, tolerance: Tolerance) -> Iterator[Difference]:
    if isinstance(before, TensorRecord) and isinstance(after, TensorRecord):
        yield from _tensors(before, after, where, tolerance, _PROPERTIES)
    elif type(before) is not type(after):
        yield Difference("type", where, f"{_type_name(before)} != {_type_name(after)}")
    elif not _same(before, after, tolerance):
        yield Difference("value", where, f"{before!r} != {after!r}")


def _type_name(leaf: object) -> str:
    return "Tensor" if isinstance(leaf, TensorRecord) else type(leaf).__name__


def _same(before: object, after: object, tolerance: Tolerance) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        if tolerance != EXACT and abs(before - after) <= tolerance.absolute + tolerance.relative * abs(before):
            return True
        both_nan = math.isnan(before) and math.isnan(after)
        return both_nan or struct.pack("d", before) == struct.pack("d", after)
    # Objects without an equality of their own are made anew by every call; their type is all that can be compared.
    if type(before).__eq__ is object.__eq__:
        return True
    try:
        return bool(before == after)
    except (RuntimeError, ValueError):
        return repr(before) == repr(after)


def _tensors(
    before: TensorRecord, after: TensorRecord, where: str, tolerance: Tolerance, properties: tuple[str, ...]
) -> Iterator[Difference]:
    alike = (before.shape, before.layout) == (after.shape, after.layout)
    for name in properties:
        one, other = getattr(before, name), getattr(after, name)
        # Strides have nothing to say where there are other axes, or none.
        if one != other and (alike or name != "stride"):
            yield Difference(name, where, f"{one} != {other}")
    if before.inner or after.inner:
        others = dict(after.inner)
        for name, one in before.inner:
            if name in others:
                yield from _tensors(one, others[name], f"{where}.{name}", tolerance, _INNER_PROPERTIES)
        return
    if (before.shape, before.dtype) == (after.shape, after.dtype) and not _has_no_values(before, after):
        detail = value_difference(before.value, after.value, tolerance)
        if detail is not None:
            yield Difference("value", where, detail)


def _has_no_values(*records: TensorRecord) -> bool:
    return any(record.device.type == "meta" for record in records)


def _homes(before: Observation, after: Observation) -> Iterator[Difference]:
    others = dict(after.homes)
    for name, home in before.homes:
        if name in others and others[name] != home:
            one, other = (str(place) if place else "has memory of its own" for place in (home, others[name]))
            yield Difference("aliasing", name, f"{one} != {other}")


def _gradients(before: Observation, after: Observation, tolerance: Tolerance) -> Iterator[Difference]:
    yield from _raised(before.backward_raised, after.backward_raised, "backward")
    if before.backward_raised or after.backward_raised:
        return
    ones, others = dict(before.gradients), dict(after.gradients)
    widest = (
        max((_largest(one) for one in ones.values() if one is not None), default=0.0) if tolerance.rounding else 0.0
    )
    for name in {**ones, **others}:
        one, other = ones.get(name), others.get(name)
        if one is None or other is None:
            if one is not other:
                yield Difference("gradient", name, "none != a gradient" if one is None else "a gradient != none")
            continue
        allowed = tolerance | _rounding(one, tolerance.rounding, widest) if tolerance.rounding else tolerance
        for found in _tensors(one, other, name, allowed, _GRADIENT_PROPERTIES):
            detail = found.detail if found.kind == "value" else f"{found.kind} {found.detail}"
            yield Difference("gradient", name, detail)


def _rounding(gradient: TensorRecord, unit: float, widest: float) -> Tolerance:
    """What a sum in another order may change: some units of rounding of the largest element, or one of `widest`.

    Terms that cancel leave a gradient that is all rounding, of terms as large as the other gradients: the bias of the
    keys in an attention, for example. Where all gradients are zero, the sign of a zero may still change.
    """
    if not _has_rounding(gradient):
        return EXACT
    coarsest = max(unit, torch.finfo(gradient.dtype).eps)
    return Tolerance(absolute=max(coarsest * max(_UNITS * _largest(gradient), widest), _LEAST))


def _largest(gradient: TensorRecord) -> float:
    """The largest magnitude of an element, infinities aside."""
    if gradient.inner:
        return max(_largest(inner) for _, inner in gradient.inner)
    if not _has_rounding(gradient):
        return 0.0
    value = gradient.value
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return float(dense.abs().nan_to_num(posinf=0.0).max())


def _has_rounding(gradient: TensorRecord) -> bool:
    value = gradient.value
    if not isinstance(value, Tensor) or value.device.type == "meta" or not value.numel():
        return False
    return value.is_floating_point() or value.is_complex()


_UNITS = 16
#: A distance that no two numbers of single precision have; with it 0.0 is -0.0, since bits do not count any more.
_LEAST = math.ulp(0.0)


def _modes(before: Moment, after: Moment) -> Iterator[Difference]:
    # After an exception, putting the modes back is right even where the original does not.
    if before.random is None and after.ambient == after.found:
        return
    for field in fields(Ambient):
        one, other = getattr(before.ambient, field.name), getattr(after.ambient, field.name)
        if field.name == "autocast":
            one, other = (tuple(set(mine) - set(theirs)) for mine, theirs in ((one, other), (other, one)))
        if one != other:
            yield Difference("mode", f"{field.name.replace('_', ' ')} {before.name}", f"{one} != {other}")


def _settings(before: Moment, after: Moment) -> Iterator[Difference]:
    for field in fields(Settings):
        one, other = getattr(before.settings, field.name), getattr(after.settings, field.name)
        if one != other:
            yield Difference("setting", f"{field.name.replace('_', ' ')} {before.name}", f"{one} != {other}")


def _random_states(before: Moment, after: Moment) -> Iterator[Difference]:
    if before.random is not None and after.random is not None:
        for generator in before.random.moved(after.random):
            yield Difference("random state", f"{generator} {before.name}", "more, fewer or other draws")


def _undeclared(before: Observation, after: Observation) -> Iterator[Difference]:
    for which, observation in (("the original", before), ("the other program", after)):
        for label in observation.undeclared:
            detail = f"{which} wrote it although its effects say that nothing does, so it was not restored"
            yield Difference("undeclared write", label, detail)
