"""What differs between two observations of the same call, one of each program: values, aliasing, gradients, modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias, final

import torch
from torch import Tensor

from partita._html import html_facts, html_table
from partita._plain_help import PlainHelp
from partita._torch.modes import Ambient
from partita._torch.tensors import is_within_storage
from partita.analysis.tolerance import EXACT, Tolerance
from partita.equivalence.inputs import input_name
from partita.equivalence.objects import Containers, Opaque, Shape
from partita.equivalence.observe import Moment, Named, Observation, Raised
from partita.equivalence.records import TensorRecord
from partita.equivalence.values import same

_Structure: TypeAlias = Mapping[str, Containers | Shape]


@final
@dataclass(frozen=True, slots=True)
class Difference(metaclass=PlainHelp):
    """One difference: its kind, where it is, how large, and in which call."""

    kind: str
    where: str
    detail: str
    when: str = ""

    def __str__(self) -> str:
        when = f" ({self.when})" if self.when else ""
        return f"{self.kind} of {self.where}{when}: {self.detail}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Comparison(metaclass=PlainHelp):
    """All differences, notes on what was not checked, and how many calls of each program were compared."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    calls: int = 0
    #: In how many of the calls the original itself raised, so that there were no results to compare.
    raised: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def _headline(self) -> str:
        count = len(self.differences)
        found = "nothing differs" if not count else f"{count} difference{'s' if count > 1 else ''}"
        return f"{found} in {self.calls} call{'' if self.calls == 1 else 's'}"

    def _repr_html_(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        if self.equal:
            return html_facts({"comparison": self._headline}, notes=notes)
        rows = [(one.kind, one.where, one.when, one.detail) for one in self.differences]
        return html_table(("kind", "where", "call", "detail"), rows, title=self._headline, notes=notes)

    def __str__(self) -> str:
        lines = [self._headline]
        lines += [f"  {difference}" for difference in self.differences]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """The first line, and the first difference."""
        first, *others = str(self).splitlines()
        return f"Comparison({first}{': ' + others[0].strip() if self.differences else ''})"


_PROPERTIES = (
    *("type", "dtype", "shape", "stride", "device", "layout"),
    *("requires_grad", "inference", "conjugate", "negative", "placements"),
    *("coalesced", "sparse_dim", "quantization"),
)
#: Properties of one layout or dtype, which others do not have.
_OF_SOME = frozenset(("coalesced", "sparse_dim", "quantization"))
#: Autograd chooses how it lays out a gradient, and a gradient is a leaf of its own.
_GRADIENT_PROPERTIES = ("dtype", "shape", "device", "layout")
#: The other properties of an inner tensor are those of its wrapper.
_INNER_PROPERTIES = ("type", "dtype", "shape", "device", "layout")


def differences(before: Observation, after: Observation, tolerance: Tolerance) -> Iterator[Difference]:
    """Everything that differs, what matters most first."""
    yield from _raised(before.raised, after.raised, "the call")
    if before.raised is None and after.raised is None:
        yield from _structures(before.structure, after.structure, lambda path: "output" + path)
        yield from _leaves(before.outputs, after.outputs, tolerance)
        yield from _aliasing(before, after)
        yield from _gradients(before, after, tolerance)
    if (before.raised is None) == (after.raised is None):
        yield from _structures(before.input_structure, after.input_structure, _input_after_the_call)
        yield from _leaves(_after_the_call(before.inputs), _after_the_call(after.inputs), tolerance)
        yield from _leaves(before.state, after.state, tolerance)
        yield from _replaced(before, after)
        yield from _added(before, after)
        yield from _switched(before, after)
    for one, other in zip(before.moments, after.moments, strict=False):
        yield from _modes(one, other)
        yield from _settings(one, other)
        if one.random is not None and other.random is not None:
            for generator in one.random.moved(other.random):
                yield Difference("random state", f"{generator} {one.name}", "more, fewer or other random numbers")
    yield from _undeclared(before, after)


def _raised(before: Raised | None, after: Raised | None, where: str) -> Iterator[Difference]:
    if (before and before.type) is not (after and after.type):
        one, other = (str(error) if error else "no exception" for error in (before, after))
        yield Difference("exception", where, f"{one} != {other}")


def _structures(before: _Structure, after: _Structure, named: Callable[[str], str]) -> Iterator[Difference]:
    """The outermost containers and objects that differ; what is inside of these differs as well."""
    outer: list[str] = []
    for path in sorted({*before, *after}, key=len):
        one, other = before.get(path), after.get(path)
        place = path.removesuffix(":")
        if one != other and not any(place.startswith(known) for known in outer):
            outer.append(place)
            texts = [str(found) if found else "no container" for found in (one, other)]
            yield Difference("structure", named(place), " != ".join(texts))


def _input_after_the_call(path: str) -> str:
    return f"{input_name(path)} after the call" if path else "the inputs after the call"


def _after_the_call(inputs: Named) -> Named:
    return tuple((f"{name} after the call", leaf) for name, leaf in inputs)


def _leaves(before: Named, after: Named, tolerance: Tolerance) -> Iterator[Difference]:
    ones, others = dict(before), dict(after)
    for name, one in ones.items():
        if name in others:
            yield from _leaf(one, others[name], name, tolerance)


def _replaced(before: Observation, after: Observation) -> Iterator[Difference]:
    """State and inputs that only one program replaced by another tensor, or that only one gave other memory."""
    for name in sorted(before.replaced ^ after.replaced):
        which = "the original" if name in before.replaced else "the other program"
        yield Difference("identity", name, f"only {which} replaces it by another tensor")
    for name in sorted(before.moved ^ after.moved):
        which = "the original" if name in before.moved else "the other program"
        yield Difference("identity", name, f"only {which} puts other memory into it")


def _added(before: Observation, after: Observation) -> Iterator[Difference]:
    """State that only one program adds to a module."""
    for name in sorted(before.added ^ after.added):
        which = "the original" if name in before.added else "the other program"
        yield Difference("structure", name, f"only {which} adds it")


def _switched(before: Observation, after: Observation) -> Iterator[Difference]:
    """Modules that only one program switched to training or to evaluation."""
    for (name, training), count in sorted(before.switched ^ after.switched):
        which = "the original" if ((name, training), count) in before.switched else "the other program"
        flags = f"training={training}, in {count} modules" if count > 1 else f"training={training}"
        yield Difference("setting", f"{name} after the call", f"only {which} leaves it with {flags}")


def _leaf(before: object, after: object, where: str, tolerance: Tolerance) -> Iterator[Difference]:
    before, after = _bare(before), _bare(after)
    if isinstance(before, TensorRecord) and isinstance(after, TensorRecord):
        yield from _tensors(before, after, where, tolerance, _PROPERTIES)
    elif type(before) is not type(after):
        yield Difference("type", where, f"{_type_name(before)} != {_type_name(after)}")
    elif same(before, after, tolerance) is False:
        yield Difference("value", where, f"{before!r} != {after!r}")


def _type_name(leaf: object) -> str:
    return "Tensor" if isinstance(leaf, TensorRecord) else type(leaf).__name__


def uncompared(before: Observation, after: Observation) -> Iterator[str]:
    """What of two observations could not be compared."""
    yield from before.notes
    for ones, others in ((before.outputs, after.outputs), (before.inputs, after.inputs)):
        found = dict(others)
        for name, one in ones:
            mine, theirs = _bare(one), _bare(found.get(name))
            if isinstance(mine, TensorRecord) and not is_within_storage(mine.value):
                yield f"the values of {name} were not compared: resizing it failed, and it is larger than its memory"
            if type(mine) is type(theirs) and not isinstance(mine, TensorRecord) and same(mine, theirs, EXACT) is None:
                yield f"{name} was compared by type only: a {type(mine).__name__} has no equality that can be trusted"


def _bare(leaf: object) -> object:
    return leaf.value if isinstance(leaf, Opaque) else leaf


def _tensors(
    before: TensorRecord, after: TensorRecord, where: str, tolerance: Tolerance, properties: tuple[str, ...]
) -> Iterator[Difference]:
    yield from (differing := list(_of_properties(before, after, where, properties)))
    if before.inner or after.inner:
        others = dict(after.inner)
        for name, one in before.inner:
            if name in others:
                yield from _tensors(one, others[name], f"{where}.{name}", tolerance, _INNER_PROPERTIES)
        return
    has_values = "meta" not in (before.device.type, after.device.type)
    readable = [is_within_storage(record.value) for record in (before, after)]
    if has_values and any(readable) and not all(readable):
        yield Difference("value", where, "only one of the programs leaves it larger than its memory")
    elif has_values and all(readable) and (before.shape, before.dtype) == (after.shape, after.dtype):
        detail = value_difference(before.value, after.value, tolerance)
        if detail is not None:
            yield Difference("value", where, detail)
        elif not differing and properties is not _GRADIENT_PROPERTIES:
            yield from _stored(before, after, where, tolerance)


def _of_properties(
    before: TensorRecord, after: TensorRecord, where: str, properties: tuple[str, ...]
) -> Iterator[Difference]:
    alike = (before.shape, before.layout) == (after.shape, after.layout)
    for name in properties:
        one, other = getattr(before, name), getattr(after, name)
        # Strides are comparable only between tensors of one shape and layout.
        comparable = alike if name == "stride" else name not in _OF_SOME or None not in (one, other)
        if one != other and comparable:
            yield Difference(name, where, f"{one} != {other}")


def _stored(before: TensorRecord, after: TensorRecord, where: str, tolerance: Tolerance) -> Iterator[Difference]:
    """The first part of two sparse or quantized tensors that differs although their elements do not."""
    others = dict(after.parts)
    for name, one in before.parts:
        found = list(_tensors(one, others[name], f"{where}.{name}", tolerance, _INNER_PROPERTIES))
        if found:
            yield from found
            return


def _aliasing(before: Observation, after: Observation) -> Iterator[Difference]:
    others = dict(after.aliases)
    for name, alias in before.aliases:
        if name in others and others[name] != alias:
            one, other = (str(found) if found else "has memory of its own" for found in (alias, others[name]))
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
    """What another order of summation may change: some rounding units of the largest element, or one of `widest`.

    Terms that cancel leave a gradient that is all rounding error, of terms as large as the other gradients: the bias of
    the keys in an attention, for example. Where all gradients are zero, the sign of a zero may still change.
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
#: Smaller than any distance in single precision; with it 0.0 equals -0.0, since bits are no longer compared.
_LEAST = math.ulp(0.0)


def _modes(before: Moment, after: Moment) -> Iterator[Difference]:
    # After an exception, restoring the modes is right even where the original does not.
    if before.random is None and after.ambient == after.found:
        return
    for field in fields(Ambient):
        one, other = getattr(before.ambient, field.name), getattr(after.ambient, field.name)
        if field.name == "autocast":
            one, other = (tuple(set(mine) - set(theirs)) for mine, theirs in ((one, other), (other, one)))
        if one != other:
            yield Difference("mode", f"{field.name.replace('_', ' ')} {before.name}", f"{one} != {other}")


def _settings(before: Moment, after: Moment) -> Iterator[Difference]:
    # Some settings belong to modes: inference mode switches off that backwards run in several threads.
    if before.random is None and not any(after.found_settings.differing(after.settings)):
        return
    for name, detail in before.settings.differing(after.settings):
        yield Difference("setting", f"{name} {before.name}", detail)


def _undeclared(before: Observation, after: Observation) -> Iterator[Difference]:
    for which, observation in (("the original", before), ("the other program", after)):
        for label in observation.undeclared:
            if label in observation.moved:
                detail = f"{which} put other memory into it although its effects do not say so"
            else:
                detail = f"{which} mutated it although its effects do not say so, so it was not restored"
            yield Difference("undeclared mutation", label, detail)


#: Of tensors that are computed with; views may have more.
_MOST_DIMENSIONS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_difference(before: Tensor, after: Tensor, tolerance: Tolerance) -> str | None:
    """How the values of two tensors of one shape and dtype differ; None if they do not.

    Where the tolerance is exact every bit counts, so 0.0 is not -0.0; but any NaN equals any other NaN.
    """
    before, after = _readable(before), _readable(after).to(before.device)
    if before.dim() > _MOST_DIMENSIONS:
        before, after = before.flatten(), after.flatten()
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
        return ~torch.isclose(_wide(after), _wide(before), equal_nan=True, **_limits(before, tolerance))
    differing = _bits(before) != _bits(after)
    # Only a NaN can differ in bits and still count as equal, so most comparisons end here.
    return differing & ~(_wide(before).isnan() & _wide(after).isnan()) if bool(differing.any()) else differing


def _limits(before: Tensor, tolerance: Tolerance) -> dict[str, float]:
    """Arguments of `isclose`; for half precision and below, at least some units in the last place.

    There one unit is wider than a tolerance for single precision, so another rounding would count as a difference.
    """
    unit = torch.finfo(before.dtype).eps
    if unit <= torch.finfo(torch.float32).eps or not before.numel():
        return {"rtol": tolerance.relative, "atol": tolerance.absolute}
    largest = float(_wide(before).abs().nan_to_num(posinf=0.0).max())
    return {"rtol": max(tolerance.relative, 4 * unit), "atol": max(tolerance.absolute, unit * largest)}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _wide(tensor: Tensor) -> Tensor:
    """8-bit floats as single precision: they have few operators of their own."""
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
