"""A variant: one compiled specialization of a body, whether it fits a call, and how its outputs are completed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor, nn

from partita._torch.expressions import Expression
from partita._torch.second_backward import refuse_second_backward
from partita.errors import BackendError
from partita.lowering._torch.gradients import UnusedGradients
from partita.lowering._torch.guards import Check, Guard, check_from
from partita.lowering.constants import Constants
from partita.lowering.dry_run import DryRun, copy_of, outputs_to_copy, views_without_gradients
from partita.lowering.signature import Signature, TensorSpec, ValueSpec

#: The sizes and strides of an input; None where they are dynamic.
Dimensions: TypeAlias = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """Which calls a variant serves: those of `signature`, except for sizes that are None in `dimensions`.

    Integers at the places in `integers` are dynamic. `conditions` are the guards on dynamic sizes.
    """

    signature: Signature
    dimensions: tuple[Dimensions | None, ...]
    integers: frozenset[int] = frozenset()
    conditions: tuple[Expression, ...] | None = None

    @classmethod
    def exactly(cls, signature: Signature) -> Fit:
        """All calls of `signature`."""
        dimensions = [(spec.sizes, spec.strides) if isinstance(spec, TensorSpec) else None for spec in signature.specs]
        return cls(signature, tuple(dimensions))

    @classmethod
    def for_any_sizes(cls, signature: Signature) -> Fit:
        """All calls with the static key of `signature`."""
        specs = [spec if isinstance(spec, TensorSpec) else None for spec in signature.specs]
        dimensions = [None if spec is None else ((None,) * len(spec.sizes),) * 2 for spec in specs]
        return cls(signature, tuple(dimensions), frozenset(place for place, spec in enumerate(specs) if spec is None))

    def takes(self, signature: Signature) -> bool:
        """Whether a call of `signature` is one of these, up to the conditions on dynamic sizes."""
        if signature.static_key != self.signature.static_key:
            return False
        specs = zip(signature.specs, self.signature.specs, self.dimensions, strict=True)
        return all(
            spec == own or place in self.integers if dimensions is None else _is_like(spec, dimensions)
            for place, (spec, own, dimensions) in enumerate(specs)
        )

    def described(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The inputs among `values` that are no parameters, in words: dtypes and sizes, `*` for dynamic ones."""
        rows = zip(values, self.signature.specs, self.dimensions, strict=False)
        return tuple(
            _described_input(spec, dimensions, is_dynamic=place in self.integers)
            for place, (value, spec, dimensions) in enumerate(rows)
            if not isinstance(value, nn.Parameter)
        )

    def guard(self, values: Sequence[Any], *, mutated: Sequence[int], detached: Sequence[int] = ()) -> Guard:
        """A fast guard for calls like the one with these values.

        Of those at the places `detached` compiled code does not ask for the `grad_fn`, and the body may.
        """
        others = [place for place, dimensions in enumerate(self.dimensions) if dimensions is None]
        # Without gradients a view may be mutated whose `grad_fn` autograd refuses to return.
        mutated = mutated if self.signature.global_state.has_gradients else ()
        return Guard(
            values,
            self.dimensions,
            constants=[place for place in others if place not in self.integers],
            integers=[place for place in others if place in self.integers],
            leaves=[place for place in mutated if isinstance(values[place], Tensor)],
            readable=detached if self.signature.global_state.has_gradients else (),
        )


@final
@dataclass(frozen=True, slots=True)
class Cause:
    """Why there is no function: the first line of the compiler's error, and the node that raised it."""

    reason: str
    node: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        text = str(error).strip()
        found = _EXECUTED.search(text)
        first = text.splitlines()[0] if text else type(error).__name__
        return cls(first, found.group(1) if found else None)


#: How torch.fx reports which node raised.
_EXECUTED = re.compile(r"While executing %(\w+)")


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """For which region a function was compiled, for which user of the variants, and how long that took."""

    region: str
    user: ref[object]
    seconds: float


class RunsVariant(Protocol):
    """Calls the function of a variant in a way of its own, such as by replaying a recorded call."""

    def run(self, variant: Variant, inputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs of the function for these inputs."""


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Variant:
    """A compiled function; none where the compiler failed, so that the body itself is called."""

    fit: Fit
    function: Callable[..., Sequence[Any]] | None
    #: The dry run; without it, the outputs are those of the function.
    dry_run: DryRun | None = None
    #: Why there is no function.
    cause: Cause | None = None
    #: The tensors that are compiled in.
    constants: Constants | None = None
    #: How many outputs the function has, where there was no dry run.
    count: int | None = None
    #: None where it was not compiled in this process.
    origin: Origin | None = None
    _copied: tuple[int, ...] | None = field(default=None, repr=False)
    _no_views: tuple[int, ...] = field(default=(), repr=False)
    _check: Check | None = field(default=None, repr=False)
    _returns_output: bool = field(default=True, repr=False)
    _unused: UnusedGradients | None = field(default=None, repr=False)
    _is_checked: bool = field(default=False, repr=False)
    _complex: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.fit.conditions is not None:
            self._check = check_from(self.fit.conditions)
        if self.dry_run is None:
            self._copied = ()
        else:
            self._returns_output = self.dry_run.is_plain
            links, mutated = self.dry_run.links, dict(self.dry_run.mutated_links)
            # Needed for a single output too: autograd also runs a function none of whose outputs has a gradient.
            self._unused = UnusedGradients(links, mutated) if any(links) or mutated else None

    def serves(self, signature: Signature, values: Sequence[Any]) -> bool:
        """Whether the variant may be called with these values, whose signature this is."""
        return self.fit.takes(signature) and self.allows(values)

    def allows(self, values: Sequence[Any]) -> bool:
        """Whether values that fit otherwise have the constants, and dynamic sizes that satisfy the conditions."""
        has_constants = self.constants is None or self.constants.are_in(values)
        return has_constants and (self._check is None or self._check(values))

    def is_current(self) -> bool:
        """Whether a call may still have the tensors that are compiled in."""
        return self.constants is None or self.constants.is_current()

    def __call__(self, values: Sequence[Any], through: RunsVariant | None = None) -> Any:
        """The output of the body for these values; the function is called by `through`, if given."""
        if self._returns_output and self._copied == () == self._no_views:
            return self._run(values, through)
        dry_run = self.dry_run
        assert dry_run is not None
        inputs = list(values)
        for place in dry_run.copied_inputs:
            inputs[place] = copy_of(inputs[place])
        for place in dry_run.detached:
            inputs[place] = inputs[place].detach()
        outputs = list(self._run(inputs, through))
        if self._copied is None:
            # Which outputs alias is up to the compiled code, so the first call shows it.
            shared = outputs_to_copy(values, outputs, dry_run.unaliased)
            later = (place for place in dry_run.mutated_later if place in dry_run.unaliased)
            self._copied = tuple(dict.fromkeys((*shared, *later)))
            if self.fit.signature.global_state.has_gradients:
                self._no_views = views_without_gradients(outputs, dry_run.unaliased)
        for place in self._no_views:
            outputs[place] = outputs[place].detach()
        for place in self._copied:
            outputs[place] = copy_of(outputs[place])
        for view in dry_run.no_grad_views:
            outputs[view.place] = view.of(outputs[view.place])
        return dry_run.assembled(outputs, values)

    def _run(self, inputs: Sequence[Any], through: RunsVariant | None) -> Sequence[Any]:
        assert self.function is not None
        unused = self._unused
        edges = () if unused is None else unused.before(inputs)
        given = inputs if self.constants is None else self.constants.others(inputs)
        outputs = self.function(*given) if through is None else through.run(self, given)
        if not self._is_checked:
            self._check_outputs(outputs)
            refuse_second_backward(outputs)
            self._complex = tuple(k for k, out in enumerate(outputs) if isinstance(out, Tensor) and out.is_complex())
        for place in self._complex:
            # Autograd may pass a lazily conjugated gradient, and compiled code would ignore its conjugate bit.
            if outputs[place].requires_grad:
                outputs[place].register_hook(_resolved)
        if unused is not None:
            unused.hook_backward(edges, outputs, inputs)
        return outputs

    def _check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raises unless the function returns what it should; checked in the first call."""
        if self.dry_run is None:
            check_outputs(outputs, count=self.count, tensors=())
        else:
            check_outputs(outputs, count=len(self.dry_run.compiled), tensors=self.dry_run.tensors)
        self._is_checked = True


def _resolved(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.resolve_conj()


def dimensions_of(value: Any) -> Dimensions | None:
    """The sizes and strides of a fake input, None for symbols."""
    if not isinstance(value, Tensor):
        return None
    return _known(value.shape), _known(value.stride())


def _known(numbers: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(None if isinstance(number, torch.SymInt) else int(number) for number in numbers)


def _is_like(spec: Any, dimensions: Dimensions) -> bool:
    return all(
        wanted is None or wanted == found
        for actual, known in zip((spec.sizes, spec.strides), dimensions, strict=True)
        for found, wanted in zip(actual, known, strict=True)
    )


def _described_input(spec: ValueSpec, dimensions: Dimensions | None, *, is_dynamic: bool) -> str:
    if not isinstance(spec, TensorSpec) or dimensions is None:
        return "*" if is_dynamic or isinstance(spec, TensorSpec) else spec.text
    sizes = ", ".join("*" if size is None else str(size) for size in dimensions[0])
    device = "" if spec.device.type == "cpu" else f" on {spec.device}"
    needs = " requires_grad" if spec.requires_grad else ""
    return f"{str(spec.dtype).removeprefix('torch.')}[{sizes}]{device}{needs}"


class WrongOutputsError(BackendError):
    """A compiled function returns other outputs than the body; the caller adds the region."""


def check_outputs(outputs: Any, *, count: int | None, tensors: Iterable[int]) -> None:
    """Raises unless `outputs` are `count` values, where that is known, with tensors at the places `tensors`.

    A tensor in the place of the tuple would silently be unpacked along its first axis.
    """
    if not isinstance(outputs, tuple | list):
        raise WrongOutputsError(f"returns {_described(outputs)} where a tuple or a list of outputs belongs")
    if count is not None and len(outputs) != count:
        raise WrongOutputsError(
            f"returns {_described(outputs)} of length {len(outputs)} where one of length {count} belongs"
        )
    for place in tensors:
        if not isinstance(outputs[place], Tensor):
            raise WrongOutputsError(f"returns {_described(outputs[place])} for output {place}, which is a tensor")


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
