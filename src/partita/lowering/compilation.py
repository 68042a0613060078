"""One compilation: a body and the signature of a call into a variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor
from torch.fx import GraphModule

from partita._torch.compile_context import compiler_scope
from partita.analysis.effects.terms import Effects
from partita.backends._torch.fake_inputs import FakeInputs, strides_of
from partita.errors import BackendError
from partita.lowering._torch.bodies import body_for_compiler
from partita.lowering._torch.dry_run import InvalidCallError
from partita.lowering._torch.gradients import require_gradients
from partita.lowering._torch.guards import conditions_of, symbolic_places
from partita.lowering.constants import Constants, holding
from partita.lowering.dry_run import DryRun, dry_run
from partita.lowering.signature import Place, Signature, Slot, TensorSpec
from partita.lowering.variant import Fit, Variant, dimensions_of


class Compiler(Protocol):
    """The part of a backend that is used at run time."""

    @property
    def name(self) -> str: ...

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]: ...


@final
@dataclass(frozen=True, slots=True)
class Compilation:
    """What is compiled, by which compiler, for which call."""

    compiler: Compiler
    body: GraphModule
    slots: tuple[Slot, ...]
    signature: Signature
    values: Sequence[Any]
    #: The places of values that may be mutated.
    mutated: tuple[int, ...]
    #: The key of the symbol for each dynamic size.
    dynamic_sizes: Mapping[Place, Hashable]
    #: The nodes of the body that have effects, and those whose storage is mutated after it has run, by name.
    effects: Mapping[str, Effects]
    mutated_later: frozenset[str]
    #: The places of values that are compiled in.
    constants: tuple[int, ...] = ()

    def run(self) -> Variant:
        """The variant; errors of the compiler propagate."""
        with compiler_scope():
            observed = self._dry_run()
            detached = () if observed is None else observed.detached
            fakes = FakeInputs()
            inputs = self._inputs(fakes, detached)
            places = symbolic_places(inputs)
            dimensions = tuple(map(dimensions_of, inputs))
            outputs = None if observed is None else observed.compiled
            body = body_for_compiler(
                self.body,
                self.slots,
                inputs=self.signature.shapes,
                outputs=outputs,
                copied_back=() if observed is None else observed.loses_strides,
            )
            constants = Constants.of(self.constants, self.values) if self.constants else None
            if constants is not None:
                body = holding(body, {place: self.values[place] for place in constants.places})
                inputs = constants.others(inputs)
            computes = outputs is None or outputs or self.effects
            function = self._compiled(body, inputs) if computes else _no_outputs
        dynamic_integers = frozenset(number for number, axis in self.dynamic_sizes if axis is None)
        fit = Fit(self.signature, dimensions, dynamic_integers, conditions_of(places, fakes.env))
        returned = self.body.graph.output_node().args[0]
        count = len(returned) if outputs is None and isinstance(returned, tuple | list) else None
        return Variant(fit, function, observed, constants=constants, count=count)

    def can_dry_run(self) -> bool:
        """Whether the body runs on fake inputs of this signature: it does not where the call itself is wrong."""
        try:
            with compiler_scope():
                return self._dry_run() is not None
        except InvalidCallError:
            return False
        except Exception:
            return True  # The body ran, or did not start.

    def _compiled(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        function = self.compiler.compile(body, inputs)
        if not callable(function):
            raise BackendError(f"its `compile` returned {function!r}, which is not callable")
        return function

    def _dry_run(self) -> DryRun | None:
        """The dry run, on separate fake inputs, since the body may mutate them."""
        fakes = FakeInputs()
        inputs, has_gradients = self._inputs(fakes), self.signature.global_state.has_gradients
        if not has_gradients:
            require_gradients(inputs, but=self.mutated)
        body = body_for_compiler(self.body, self.slots, inputs=self.signature.shapes)
        return dry_run(
            body,
            inputs,
            fakes.mode,
            effects=self.effects,
            mutated_later=self.mutated_later,
            has_gradients=has_gradients,
        )

    def _inputs(self, fakes: FakeInputs, detached: Collection[int] = ()) -> list[Any]:
        return [self._input(fakes, place, is_detached=place in detached) for place in range(len(self.values))]

    def _input(self, fakes: FakeInputs, place: int, *, is_detached: bool) -> Any:
        value, spec = self.values[place], self.signature.specs[place]
        if not isinstance(value, Tensor) or not isinstance(spec, TensorSpec):
            key = self.dynamic_sizes.get((place, None))
            return value if key is None else fakes.number(value, key)
        keys = [self.dynamic_sizes.get((place, axis)) for axis in range(len(spec.sizes))]
        pairs = zip(spec.sizes, keys, strict=True)
        sizes = [size if key is None else fakes.size(size, key) for size, key in pairs]
        return fakes.tensor(
            sizes,
            strides_of(spec.sizes, spec.strides, sizes),
            dtype=spec.dtype,
            device=spec.device,
            requires_grad=spec.requires_grad and not is_detached,
            is_leaf=spec.leaf,
        )


def _no_outputs(*_: object) -> tuple[()]:
    """The function of a body that only returns inputs and views of them."""
    return ()
