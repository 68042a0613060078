"""One specialization and its outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from partita._torch.expressions import Expression
from partita.errors import BackendError
from partita.lowering._torch.conditions import Check, check_from
from partita.lowering._torch.gradients import UnusedGradients
from partita.lowering._torch.guards import Guard
from partita.lowering.dry_run import DryRun, copy_of, places_to_copy
from partita.lowering.signature import Signature, TensorLook

__all__ = ["Cause", "Fit", "Variant", "WrongOutputsError", "check_outputs", "dimensions_of"]


# A variant: the function that was compiled for one signature, and what else it may be called with.


#: The sizes and strides of an input; None where any will do, or for an input that is no tensor.
Dimensions: TypeAlias = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """Which calls a variant serves: those like `signature`, with the sizes open that `dimensions` leave open.

    Integers at the places in `integers` may change. `conditions` are what open sizes must satisfy.
    """

    signature: Signature
    dimensions: tuple[Dimensions | None, ...]
    integers: frozenset[int] = frozenset()
    conditions: tuple[Expression, ...] | None = None

    @classmethod
    def exactly(cls, signature: Signature) -> Fit:
        """All calls of `signature`."""
        dimensions = [(look.sizes, look.strides) if isinstance(look, TensorLook) else None for look in signature.looks]
        return cls(signature, tuple(dimensions))

    @classmethod
    def of_kind(cls, signature: Signature) -> Fit:
        """All calls of the kind of `signature`."""
        looks = [look if isinstance(look, TensorLook) else None for look in signature.looks]
        dimensions = [None if look is None else ((None,) * len(look.sizes),) * 2 for look in looks]
        return cls(signature, tuple(dimensions), frozenset(place for place, look in enumerate(looks) if look is None))

    def takes(self, signature: Signature) -> bool:
        """Whether a call of `signature` is one of these, as far as open sizes do not matter."""
        if signature.kind != self.signature.kind:
            return False
        looks = zip(signature.looks, self.signature.looks, self.dimensions, strict=True)
        return all(
            look == own or place in self.integers if dimensions is None else _is_like(look, dimensions)
            for place, (look, own, dimensions) in enumerate(looks)
        )

    def guard(self, values: Sequence[Any], *, written: Sequence[int]) -> Guard:
        """The quick form of all this for calls like the one with these values."""
        others = [place for place, dimensions in enumerate(self.dimensions) if dimensions is None]
        # Without gradients a view may be written whose history autograd refuses to tell.
        written = written if self.signature.surroundings.has_gradients else ()
        return Guard(
            values,
            self.dimensions,
            constants=[place for place in others if place not in self.integers],
            integers=[place for place in others if place in self.integers],
            leaves=[place for place in written if isinstance(values[place], Tensor)],
        )


@final
@dataclass(frozen=True, slots=True)
class Cause:
    """Why there is no function: the first line of what the compiler said, and the node where it said so."""

    reason: str
    node: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        text = str(error).strip()
        found = _EXECUTED.search(text)
        first = text.splitlines()[0] if text else type(error).__name__
        return cls(first, found.group(1) if found else None)


#: How torch.fx tells which node raised.
_EXECUTED = re.compile(r"While executing %(\w+)")


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Variant:
    """A compiled function; none where the compiler failed, so that the body itself is called."""

    fit: Fit
    function: Callable[..., Sequence[Any]] | None
    #: What is known of the output; without it, it is what the function gives.
    findings: DryRun | None = None
    #: Why there is no function.
    cause: Cause | None = None
    #: How many outputs the function gives, where nothing else is known of them.
    count: int | None = None
    _copied: tuple[int, ...] | None = field(default=None, repr=False)
    _check: Check | None = field(default=None, repr=False)
    _gives_output: bool = field(default=True, repr=False)
    _unused: UnusedGradients | None = field(default=None, repr=False)
    _is_checked: bool = field(default=False, repr=False)
    _complex: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.fit.conditions is not None:
            self._check = check_from(self.fit.conditions)
        if self.findings is None:
            self._copied = ()
        else:
            self._gives_output = self.findings.is_plain
            self._unused = _unused_gradients(self.findings)

    def serves(self, signature: Signature, values: Sequence[Any]) -> bool:
        """Whether the variant may be called with these values, whose signature this is."""
        return self.fit.takes(signature) and self.allows(values)

    def allows(self, values: Sequence[Any]) -> bool:
        """Whether the open sizes of values that fit otherwise are such as the compiler took them for."""
        return self._check is None or self._check(values)

    def __call__(self, values: Sequence[Any]) -> Any:
        """What the body gives for these values."""
        if self._gives_output and self._copied == ():
            return self._run(values)
        findings = self.findings
        assert findings is not None
        inputs = list(values)
        for place in findings.copied_inputs:
            inputs[place] = copy_of(inputs[place])
        for place in findings.detached:
            inputs[place] = inputs[place].detach()
        outputs = list(self._run(inputs))
        if self._copied is None:
            # Which outputs share memory is decided by the compiled code, so the first call shows it.
            shared = places_to_copy(values, outputs, findings.owned)
            later = (place for place in findings.written_later if place in findings.owned)
            self._copied = tuple(dict.fromkeys((*shared, *later)))
        for place in self._copied:
            outputs[place] = copy_of(outputs[place])
        for view in findings.no_grad_views:
            outputs[view.place] = view.of(outputs[view.place])
        return findings.assembled(outputs, values)

    def _run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        assert self.function is not None
        unused = self._unused
        edges = () if unused is None else unused.before(inputs)
        outputs = self.function(*inputs)
        if not self._is_checked:
            self._check_outputs(outputs)
            self._complex = tuple(k for k, out in enumerate(outputs) if isinstance(out, Tensor) and out.is_complex())
        for place in self._complex:
            # Autograd may give a gradient whose conjugation is a bit, which compiled code takes for the memory itself.
            if outputs[place].requires_grad:
                outputs[place].register_hook(Tensor.resolve_conj)
        if unused is not None:
            unused.watch(edges, outputs, inputs)
        return outputs

    def _check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raises unless the function gives what it should; the first call shows it."""
        if self.findings is None:
            check_outputs(outputs, count=self.count, tensors=())
        else:
            check_outputs(outputs, count=len(self.findings.compiled), tensors=self.findings.tensors)
        self._is_checked = True


def _unused_gradients(findings: DryRun) -> UnusedGradients | None:
    # Needed for a single output too: autograd also comes to a function none of whose outputs has a gradient.
    if not any(findings.links) and not findings.written_links:
        return None
    return UnusedGradients(findings.links, dict(findings.written_links))


def dimensions_of(value: Any) -> Dimensions | None:
    """The sizes and strides of a fake input that are no symbols."""
    if not isinstance(value, Tensor):
        return None
    return _known(value.shape), _known(value.stride())


def _known(numbers: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(None if isinstance(number, torch.SymInt) else int(number) for number in numbers)


def _is_like(look: Any, dimensions: Dimensions) -> bool:
    return all(
        wanted is None or wanted == found
        for given, known in zip((look.sizes, look.strides), dimensions, strict=True)
        for found, wanted in zip(given, known, strict=True)
    )


# Checked outputs: what a compiled function gives, looked at once: a tuple or a list, with all outputs of the body.


class WrongOutputsError(BackendError):
    """What a function gives that keeps no promise; whoever called it knows for which region, and says so."""


def check_outputs(outputs: Any, *, count: int | None, tensors: Iterable[int]) -> None:
    """Raises unless `outputs` are `count` values, where that is known, with tensors at the places `tensors`.

    A tensor in the place of the tuple would be taken apart along its first axis, and nobody would notice.
    """
    if not isinstance(outputs, tuple | list):
        raise WrongOutputsError(f"gives {_kind(outputs)} where a tuple or a list of outputs belongs")
    if count is not None and len(outputs) != count:
        raise WrongOutputsError(f"gives {_kind(outputs)} of length {len(outputs)} where one of length {count} belongs")
    for place in tensors:
        if not isinstance(outputs[place], Tensor):
            raise WrongOutputsError(f"gives {_kind(outputs[place])} for output {place}, which is a tensor")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
