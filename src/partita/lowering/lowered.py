"""LoweredModule: dispatch of one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Proxy

from partita._torch.fx.lazy_graph_module import make_lazy_again
from partita._torch.nn_modules import StandsForBody
from partita.errors import BackendError
from partita.lowering._torch.containers import LEAF, Leaf, Shape, leaves_of, shape_of
from partita.lowering._torch.gradients import hides_history
from partita.lowering._torch.guards import Guard, profiler_runs, surroundings, watched
from partita.lowering.compilation import Compilation
from partita.lowering.config import Lowering
from partita.lowering.dry_run import memory_of
from partita.lowering.signature import (
    Call,
    DynamicSizes,
    ModuleLook,
    ModuleState,
    Signature,
    signature_of,
    unfit_reason,
)
from partita.lowering.variant import Cause, Fit, Variant, WrongOutputsError
from partita.lowering.variant_cache import LruTable, Variants
from partita.program.body_effects import EffectfulNodes

__all__ = ["Lowered"]


# A lowered region: a module that runs compiled code where its body was called, made when it is first needed.


@final
class Lowered(StandsForBody):
    """Calls compiled code, or the body itself where that is not possible, under the modes of the body."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        super().__init__()
        self.training = body.training
        self.body = body
        self.lowering = lowering
        self._variants = variants
        self._choice = Dispatcher(body, lowering, variants)
        # `Graph.eliminate_dead_code` asks for this name.
        self._is_impure = getattr(body, "_is_impure", False)

    def forward(self, *inputs: Any, tag: str | None = None) -> Any:
        """What the body gives; a profiler shows the call under `tag`, or under that of the lowering."""
        if torch.compiler.is_dynamo_compiling():
            return self._traced(inputs)
        if profiler_runs():
            with torch.profiler.record_function(tag or self.lowering.tag):
                return self._in_scope(inputs)
        return self._in_scope(inputs)

    def compile_for(self, inputs: Sequence[Any]) -> None:
        """Compiles for calls with inputs that look like these, which may be fake, in the modes of now."""
        scope = self.lowering.scope
        if scope is None:
            self._choice.make_for(inputs)
        else:
            scope.call(self._choice.make_for, inputs)

    def _in_scope(self, inputs: Sequence[Any]) -> Any:
        scope = self.lowering.scope
        if scope is None:
            return self._called(inputs)
        return self._traced(inputs) if watched() else scope.call(self._called, inputs)

    def _called(self, inputs: Sequence[Any]) -> Any:
        chosen = self._choice.of(inputs)
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
        """What the body gives, for somebody who watches every operator of it."""
        scope = self.lowering.scope
        return self._run_body(inputs) if scope is None else scope.as_traced.call(self._run_body, inputs)

    def _run_body(self, inputs: Sequence[Any]) -> Any:
        return self.body(*inputs)

    def __getstate__(self) -> dict[str, Any]:
        """What was seen so far stays behind; the variants know how they are copied and stored."""
        return {name: value for name, value in self.__dict__.items() if name != "_choice"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        make_lazy_again(self.body)
        self._choice = Dispatcher(self.body, self.lowering, self._variants)


# The choice of what runs for a call: a function that was compiled for calls like it, a new one, or the body itself.


@final
@dataclass(frozen=True, slots=True)
class _LastUse:
    """The variant that the last call used, and the quick way to tell whether it serves the next one."""

    guard: Guard
    variant: Variant
    shapes: tuple[Shape, ...]
    modules: ModuleLook | None
    #: The places of values that the body writes.
    written: tuple[int, ...]

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
    """The body, for a call that a compiler failed on; `note` is called if it runs, since else the call was wrong."""

    body: GraphModule
    note: Callable[[], None]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        given = self.body(*inputs)
        self.note()
        return given


@final
class Dispatcher:
    """What one region has seen so far."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        self._body, self._lowering, self._variants = body, lowering, variants
        self._calls = Calls(body)
        self._open_sizes = lowering.open_sizes
        #: The last signature of each kind.
        self._seen: LruTable[Signature] = LruTable()
        self._last: _LastUse | None = None
        variants.serve(self)

    def of(self, inputs: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], Any], Sequence[Any]] | None:
        """What to call for these inputs, and with which values; None where the body itself must run."""
        call, last = self._calls.of(inputs), self._last
        if last is None or not last.serves(call):
            call = self._calls.taken_apart(call)
            found = self._looked_up(call)
            if isinstance(found, _Trial):
                return found, inputs
            last = found
        if last is None or last.variant.function is None or (last.written and _overlap(call.values, last.written)):
            return None
        return last.variant, call.values

    def make_for(self, inputs: Sequence[Any]) -> None:
        """Compiles for calls with inputs that look like these; where that fails, the first such call will say so."""
        self._found_or_made(self._calls.taken_apart(self._calls.of(inputs)))

    def _looked_up(self, call: Call) -> _LastUse | _Trial | None:
        """The variant for these values, found or made; None where the body must run and nobody is to blame."""
        if watched() or not self._is_fit(call):
            return None
        found = self._found_or_made(call)
        if found is None or isinstance(found, _Trial):
            return found
        variant, written = found
        if variant.cause is not None:
            self._lowering.report(variant.cause)
        guard = variant.fit.guard(call.values, written=written)
        self._last = _LastUse(guard, variant, call.shapes, call.modules, written)
        return self._last

    def _found_or_made(self, call: Call) -> tuple[Variant, tuple[int, ...]] | _Trial | None:
        """The variant for a call, with the places of values that are written."""
        around, lowering = surroundings(), self._lowering
        if call.modules is not None:
            lowering = lowering.for_modules(call.modules.state.key, self._body)
        if any(not isinstance(call.shapes[place], Leaf) for place in lowering.written):
            return None  # What is put into a container would only be put into a copy.
        written = (*call.places_of(lowering.written), *call.state_that_may_be_written())
        if not around.inference and (around.grad or written) and any(map(_is_inference_tensor, call.values)):
            # Compiled code might save or write a tensor that can be neither, where the body would not.
            return None
        if around.has_gradients and any(map(hides_history, call.values)):
            return None  # The body may do what needs no history, such as a write under no_grad.
        signature = signature_of(call, around, written=written, picks_kernels=lowering.picks_kernels)
        open_sizes = self._open_sizes_after(signature)
        variant = self._variants.find(signature, call.values) or self._made(
            signature, call, written, lowering.acts, open_sizes
        )
        if isinstance(variant, _Trial):
            return variant
        self._open_sizes = open_sizes
        self._seen.note(signature.kind, signature)
        return variant, written

    def _open_sizes_after(self, signature: Signature) -> DynamicSizes:
        """With what differs from the last call of its kind; what others that share functions have seen is theirs."""
        before = self._seen.get(signature.kind)
        return self._open_sizes if before in (None, signature) else self._open_sizes.after(before, signature)

    def _made(
        self, signature: Signature, call: Call, written: tuple[int, ...], acts: EffectfulNodes, open_sizes: DynamicSizes
    ) -> Variant | _Trial:
        lowering = self._lowering
        if signature.needs_gradients and not lowering.trains:
            return Variant(Fit.of_kind(signature), None, cause=Cause(_WITHOUT_GRADIENTS))
        compilation = Compilation(
            self._variants.compiler,
            self._body,
            call.slots,
            signature,
            call.values,
            acts,
            written,
            open_sizes.of(signature, call),
        )
        try:
            return self._variants.find_or_make(compilation, title=lowering.title)
        except Exception as error:
            return self._tried(compilation, error)

    def _tried(self, compilation: Compilation, error: Exception) -> _Trial:
        """What runs where a compilation has just failed; raises where that is wanted and the call cannot be wrong."""

        def note() -> None:
            cause = Cause.of(error)
            self._variants.give_up(compilation.signature, cause)
            self._lowering.report(cause, error)

        if self._lowering.strict and self._variants.can_be_rehearsed(compilation):
            note()
        return _Trial(self._body, note)

    def _is_fit(self, call: Call) -> bool:
        """Whether code can be made for such a call; tensors of another class, and tracers, are no fault."""
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


def _overlap(values: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether a value that is written shares memory with another: code is made for values that do not."""
    keys = [memory_of(value) for value in values]
    if len(set(keys)) == len(keys):
        return False
    holders = Counter(keys)
    return any(holders[keys[place]] > 1 for place in written)


def _is_inference_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


_WITHOUT_GRADIENTS = "gradients are needed, which it does not give; call the program under torch.no_grad()"


# Calls of a body as compiled code sees them: what is in containers, and the state of modules, as own values.


@final
class Calls:
    """Makes calls of inputs; most bodies call no modules and get no containers, and then the inputs are the values."""

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
        return Call((*values, *state.read()), shapes, state.look())

    def taken_apart(self, call: Call) -> Call:
        """The same call without the containers among its values; all calls are taken apart from now on."""
        if self._has_containers or not any(isinstance(value, tuple | list | dict) for value in call.values):
            return call
        self._has_containers = True
        return self.of(call.values[: len(self._leaves)])
