"""A lowered region: dispatches each call to a compiled variant, a new compilation, or the body itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule, Proxy

from partita._torch.fx.lazy_graph_module import make_lazy_again
from partita._torch.nn_modules import StandsForBody
from partita.errors import BackendError
from partita.lowering._torch.containers import LEAF, Leaf, Shape, leaves_of, shape_of
from partita.lowering._torch.gradients import hides_history
from partita.lowering._torch.guards import Guard, is_intercepted, profiler_runs, read_global_state
from partita.lowering.compilation import Compilation
from partita.lowering.config import Lowering
from partita.lowering.constants import can_be_constant
from partita.lowering.cuda_graphs import CudaGraphs
from partita.lowering.dry_run import memory_of
from partita.lowering.signature import (
    Call,
    DynamicSizes,
    ModuleSnapshot,
    ModuleState,
    Signature,
    signature_of,
    unfit_reason,
)
from partita.lowering.stored_layout import check_layout, layout, refuse_pickle
from partita.lowering.variant import Cause, Fit, Variant, WrongOutputsError
from partita.lowering.variant_cache import LruTable, Variants


@final
class Lowered(StandsForBody):
    """Runs compiled code, or the body itself where that is not possible, under the modes of the body."""

    def __new__(cls, *parts: Any) -> Self:
        """Refuses pickles of versions that did not store their layout: these make a module without its parts."""
        if not parts:
            refuse_pickle()
        return super().__new__(cls)

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        super().__init__()
        self.training = body.training
        self.body = body
        self.lowering = lowering
        self._variants = variants
        self._dispatcher = Dispatcher(body, lowering, variants)
        # `Graph.eliminate_dead_code` reads this attribute.
        self._is_impure = getattr(body, "_is_impure", False)

    def forward(self, *inputs: Any, tag: str | None = None) -> Any:
        """The output of the body; a profiler shows the call under `tag`, or under that of the lowering."""
        if torch.compiler.is_dynamo_compiling():
            return self._traced(inputs)
        if profiler_runs():
            with torch.profiler.record_function(tag or self.lowering.tag):
                return self._in_scope(inputs)
        return self._in_scope(inputs)

    def compile_for(self, inputs: Sequence[Any]) -> None:
        """Compiles for calls with inputs like these, which may be fake, in the current modes."""
        scope = self.lowering.scope
        if scope is None:
            self._dispatcher.make_for(inputs)
        else:
            scope.call(self._dispatcher.make_for, inputs)

    def _in_scope(self, inputs: Sequence[Any]) -> Any:
        scope = self.lowering.scope
        if scope is None:
            return self._called(inputs)
        return self._traced(inputs) if is_intercepted() else scope.call(self._called, inputs)

    def _called(self, inputs: Sequence[Any]) -> Any:
        chosen = self._dispatcher.select(inputs)
        if chosen is None:
            return self._run_body(inputs)
        function, values = chosen
        try:
            return function(values)
        except WrongOutputsError as error:
            region, backend = self.lowering.region, self.lowering.backend
            raise BackendError(
                f"{region}: the function that {backend} made {error}; try the backend with check_backend"
            ) from error

    def _traced(self, inputs: Sequence[Any]) -> Any:
        """The output of the body, for a tracer that must see every operator."""
        scope = self.lowering.scope
        return self._run_body(inputs) if scope is None else scope.as_traced.call(self._run_body, inputs)

    def _run_body(self, inputs: Sequence[Any]) -> Any:
        return self.body(*inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (layout(),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """Without the dispatcher, which only holds caches; the variants have their own `__reduce__`."""
        return {name: value for name, value in self.__dict__.items() if name != "_dispatcher"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        make_lazy_again(self.body)
        self._dispatcher = Dispatcher(self.body, self.lowering, self._variants)


def _blank(stored_layout: str) -> Lowered:
    """A module whose state is set next; a pickle of another layout is refused before that is read."""
    check_layout(stored_layout)
    return Lowered.__new__(Lowered, stored_layout)


@final
@dataclass(frozen=True, slots=True)
class _LastUse:
    """The variant that the last call used, and the fast guard for whether it serves the next one."""

    guard: Guard
    variant: Variant
    shapes: tuple[Shape, ...]
    modules: ModuleSnapshot | None
    #: The places of values that the body mutates.
    mutated: tuple[int, ...]
    #: The variant, or what replays recordings of it.
    function: Callable[[Sequence[Any]], Any]

    def serves(self, call: Call) -> bool:
        return (
            self.shapes == call.shapes
            and self.modules == call.modules
            and self.guard.accepts(call.values)
            and self.variant.allows(call.values)
        )


@final
@dataclass(frozen=True, slots=True)
class _Trial:
    """The body, for a call on which compilation failed; `note` is called if it runs, since else the call was wrong."""

    body: GraphModule
    note: Callable[[], None]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        output = self.body(*inputs)
        self.note()
        return output


@final
class Dispatcher:
    """Selects what runs for each call of one region."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        self._body, self._lowering, self._variants = body, lowering, variants
        self._calls = Calls(body)
        self._dynamic_sizes = lowering.dynamic_sizes
        #: The last signature of each static key.
        self._seen: LruTable[Signature] = LruTable()
        self._last: _LastUse | None = None
        self._noted: WeakSet[Variant] = WeakSet()
        self._cuda_graphs = None if lowering.cuda_graphs is None else CudaGraphs(lowering)
        variants.serve(self)

    def select(self, inputs: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], Any], Sequence[Any]] | None:
        """The function for these inputs, and its arguments; None where the body itself must run."""
        call, last = self._calls.of(inputs), self._last
        if last is None or not last.serves(call):
            call = self._calls.flattened(call)
            found = self._look_up(call)
            if isinstance(found, _Trial):
                return found, inputs
            last = found
        if last is None or last.variant.function is None or (last.mutated and _overlap(call.values, last.mutated)):
            return None
        return last.function, call.values

    def make_for(self, inputs: Sequence[Any]) -> None:
        """Compiles for calls with inputs like these; where that fails, the first such call reports it."""
        self._found_or_made(self._calls.flattened(self._calls.of(inputs)))

    def _look_up(self, call: Call) -> _LastUse | _Trial | None:
        """The variant for these values, found or compiled; None where the body must run without a failure to report."""
        if is_intercepted() or not self._is_fit(call):
            return None
        found = self._found_or_made(call)
        if found is None or isinstance(found, _Trial):
            return found
        variant, mutated = found
        if variant.cause is not None:
            self._lowering.report(variant.cause)
        detached = () if variant.dry_run is None else variant.dry_run.detached
        guard = variant.fit.guard(call.values, mutated=mutated, detached=detached)
        function = self._recorded(variant, call, mutated)
        self._last = _LastUse(guard, variant, call.shapes, call.modules, mutated, function)
        return self._last

    def _recorded(self, variant: Variant, call: Call, mutated: tuple[int, ...]) -> Callable[[Sequence[Any]], Any]:
        """The variant, called through its CUDA graphs where there are such."""
        if self._cuda_graphs is None or variant.function is None:
            return variant
        recordings = self._cuda_graphs.of(variant, call, mutated, self._lowering_for(call))
        return variant if recordings is None else partial(variant, through=recordings)

    def _lowering_for(self, call: Call) -> Lowering:
        if call.modules is None:
            return self._lowering
        return self._lowering.for_modules(call.modules.state.key, self._body)

    def _found_or_made(self, call: Call) -> tuple[Variant, tuple[int, ...]] | _Trial | None:
        """The variant for a call, with the places of values that are mutated; None where the body must run."""
        global_state, lowering = read_global_state(), self._lowering_for(call)
        if any(not isinstance(call.shapes[place], Leaf) for place in lowering.mutated_inputs):
            return None  # A mutation of a container would only reach its copy.
        mutated = (*call.places_of(lowering.mutated_inputs), *call.mutable_state())
        if (
            not global_state.inference
            and (global_state.grad or mutated)
            and any(isinstance(value, Tensor) and value.is_inference() for value in call.values)
        ):
            # Compiled code might save or mutate an inference tensor, which is an error, where the body would not.
            return None
        if global_state.has_gradients and any(map(hides_history, call.values)):
            return None  # The body may not need its `grad_fn`, as for a mutation under no_grad.
        signature = signature_of(call, global_state, mutated=mutated, picks_kernels=lowering.picks_kernels)
        dynamic_sizes = self._dynamic_sizes_after(signature)
        variant = self._variants.find(signature, call.values) or self._made(
            signature, call, mutated, lowering, dynamic_sizes
        )
        if isinstance(variant, _Trial):
            return variant
        self._dynamic_sizes = dynamic_sizes
        self._seen.note(signature.static_key, signature)
        if variant not in self._noted:
            self._noted.add(variant)
            lowering.note(variant, call.values[: len(call.values) - len(call.slots)], user=self)
        return variant, mutated

    def _dynamic_sizes_after(self, signature: Signature) -> DynamicSizes:
        """With what differs from the last call of its static key in this region, whatever other users have seen."""
        before = self._seen.get(signature.static_key)
        return self._dynamic_sizes if before in (None, signature) else self._dynamic_sizes.after(before, signature)

    def _made(
        self,
        signature: Signature,
        call: Call,
        mutated: tuple[int, ...],
        lowering: Lowering,
        dynamic_sizes: DynamicSizes,
    ) -> Variant | _Trial:
        if signature.needs_gradients and not lowering.trains:
            return Variant(Fit.for_any_sizes(signature), None, cause=Cause(_WITHOUT_GRADIENTS))
        compilation = Compilation(
            self._variants.compiler,
            self._body,
            call.slots,
            signature,
            call.values,
            mutated,
            dynamic_sizes.of(signature, call),
            effects=lowering.effects,
            mutated_later=lowering.mutated_later,
            constants=self._constants(call, mutated),
        )
        try:
            return self._variants.find_or_make(compilation, user=self, region=lowering.region, title=lowering.title)
        except Exception as error:
            return self._tried(compilation, error)

    def _constants(self, call: Call, mutated: Collection[int]) -> tuple[int, ...]:
        """The places of tensors to compile in: inputs and state of modules that are not mutated."""
        if self._lowering.constants is None:
            return ()
        state = range(len(call.values) - len(call.slots), len(call.values))
        places = (*call.places_of(self._lowering.constants), *state)
        return tuple(place for place in places if place not in mutated and can_be_constant(call.values[place]))

    def _tried(self, compilation: Compilation, error: Exception) -> _Trial:
        """What runs after a failed compilation; raises with `strict`, unless the call itself may be wrong."""

        def note() -> None:
            cause = Cause.of(error)
            self._variants.give_up(compilation.signature, cause)
            self._lowering.report(cause, error)

        if self._lowering.strict and self._variants.can_dry_run(compilation):
            note()
        return _Trial(self._body, note)

    def _is_fit(self, call: Call) -> bool:
        """Whether such a call can be compiled for; tensor subclasses and proxies are not reported as failures."""
        if call.modules is not None and call.modules.state.call_overrides is not None:
            self._lowering.report(Cause(f"{call.modules.state.call_overrides}, which a trace would lose"))
            return False
        for place, value in enumerate(call.values):
            reason = unfit_reason(value)
            if reason is not None:
                if not isinstance(value, Tensor | Proxy):
                    cause = Cause(f"input {place} {reason}; only tensors and numbers can be compiled for")
                    self._lowering.report(cause)
                return False
        return True


def _overlap(values: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Whether a value that is mutated aliases another: compiled code assumes that none does."""
    keys = [memory_of(value) for value in values]
    if len(set(keys)) == len(keys):
        return False
    holders = Counter(keys)
    return any(holders[keys[place]] > 1 for place in mutated)


_WITHOUT_GRADIENTS = "gradients are needed, which it does not give; call the program under torch.no_grad()"


@final
class Calls:
    """Flattens containers and module state into the arguments of compiled code; most bodies have neither."""

    def __init__(self, body: GraphModule) -> None:
        self._body = body
        self._state = ModuleState(body)
        self._has_modules = bool(self._state)
        self._leaves = (LEAF,) * len(body.graph.find_nodes(op="placeholder"))
        self._has_containers = False

    def of(self, inputs: Sequence[Any]) -> Call:
        """The call with these inputs."""
        if not self._has_containers and not self._has_modules:
            return Call(inputs, self._leaves)
        shapes: tuple[Shape, ...] = self._leaves
        values: Sequence[Any] = inputs
        if self._has_containers:
            shapes = tuple(map(shape_of, inputs))
            values = [leaf for value, shape in zip(inputs, shapes, strict=True) for leaf in leaves_of(value, shape)]
        if not self._has_modules:
            return Call(values, shapes)
        state = self._state
        if not state.is_current():
            state = self._state = ModuleState(self._body)
        return Call((*values, *state.read()), shapes, state.snapshot())

    def flattened(self, call: Call) -> Call:
        """The same call with its containers flattened, as in all calls from now on."""
        if self._has_containers or not any(isinstance(value, tuple | list | dict) for value in call.values):
            return call
        self._has_containers = True
        return self.of(call.values[: len(self._leaves)])
