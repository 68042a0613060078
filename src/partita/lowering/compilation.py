"""One compilation: a body and the looks of its inputs into a variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from torch import Tensor
from torch.fx import GraphModule

from partita.backends._torch.compile_context import compiler_scope
from partita.backends._torch.fake_inputs import FakeInputs, strides_of
from partita.errors import BackendError
from partita.lowering._torch.bodies import body_for_compiler
from partita.lowering._torch.conditions import conditions_of, symbolic_places
from partita.lowering._torch.gradients import ask_for_gradients
from partita.lowering.dry_run import DryRun, dry_run
from partita.lowering.signature import Place, Signature, Slot, TensorLook
from partita.lowering.variant import Fit, Variant, dimensions_of
from partita.program.body_effects import EffectfulNodes

__all__ = ["Compilation", "Compiler"]


class Compiler(Protocol):
    """The part of a backend that is needed at run time."""

    @property
    def name(self) -> str: ...

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]: ...


@final
@dataclass(frozen=True, slots=True)
class Compilation:
    """What is compiled, by whom, for which call."""

    compiler: Compiler
    body: GraphModule
    slots: tuple[Slot, ...]
    signature: Signature
    values: Sequence[Any]
    acts: EffectfulNodes
    #: The places of values that may be written.
    written: tuple[int, ...]
    #: The key of the symbol for each size that is open.
    open_sizes: Mapping[Place, Hashable]

    def run(self) -> Variant:
        """The variant; whatever the compiler raises is raised here."""
        with compiler_scope():
            findings = self._rehearsed()
            detached = () if findings is None else findings.detached
            fakes = FakeInputs()
            inputs = self._inputs(fakes, detached)
            places = symbolic_places(inputs)
            dimensions = tuple(map(dimensions_of, inputs))
            outputs = None if findings is None else findings.compiled
            body = body_for_compiler(self.body, self.slots, inputs=self.signature.shapes, outputs=outputs)
            computes = outputs is None or outputs or self.acts.acting
            function = self._compiled(body, inputs) if computes else _nothing
        open_integers = frozenset(number for number, axis in self.open_sizes if axis is None)
        fit = Fit(self.signature, dimensions, open_integers, conditions_of(places, fakes.env))
        return Variant(fit, function, findings, count=None if outputs is not None else _output_count(self.body))

    def can_be_rehearsed(self) -> bool:
        """Whether the body runs on inputs that look like these: it does not where the call itself is wrong."""
        try:
            with compiler_scope():
                return self._rehearsed() is not None
        except Exception:
            return True  # The body ran, or was never tried.

    def with_known_sizes(self) -> Compilation:
        """The same with no size left open."""
        return replace(self, open_sizes={})

    def _compiled(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        function = self.compiler.compile(body, inputs)
        if not callable(function):
            raise BackendError(f"its `compile` gave {function!r}, which cannot be called")
        return function

    def _rehearsed(self) -> DryRun | None:
        """What the body gives; found on fakes of its own, since running a body changes them."""
        fakes = FakeInputs()
        inputs, has_gradients = self._inputs(fakes), self.signature.surroundings.has_gradients
        if not has_gradients:
            ask_for_gradients(inputs, but=self.written)
        body = body_for_compiler(self.body, self.slots, inputs=self.signature.shapes)
        return dry_run(body, inputs, fakes.mode, self.acts, has_gradients=has_gradients)

    def _inputs(self, fakes: FakeInputs, detached: Collection[int] = ()) -> list[Any]:
        return [self._input(fakes, place, is_detached=place in detached) for place in range(len(self.values))]

    def _input(self, fakes: FakeInputs, place: int, *, is_detached: bool) -> Any:
        value, look = self.values[place], self.signature.looks[place]
        if not isinstance(value, Tensor) or not isinstance(look, TensorLook):
            key = self.open_sizes.get((place, None))
            return value if key is None else fakes.number(value, key)
        keys = [self.open_sizes.get((place, axis)) for axis in range(len(look.sizes))]
        pairs = zip(look.sizes, keys, strict=True)
        sizes = [size if key is None else fakes.size(size, key) for size, key in pairs]
        return fakes.tensor(
            sizes,
            strides_of(look.sizes, look.strides, sizes),
            dtype=look.dtype,
            device=look.device,
            requires_grad=look.requires_grad and not is_detached,
            is_leaf=look.leaf,
        )


def _output_count(body: GraphModule) -> int | None:
    given = body.graph.output_node().args[0]
    return len(given) if isinstance(given, tuple | list) else None


def _nothing(*_: object) -> tuple[()]:
    """What is made of a body that only gives views of its inputs."""
    return ()
