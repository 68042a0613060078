"""The choice of what runs for a call: a function that was compiled for calls like it, a new one, or the body itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.fx import GraphModule, Proxy

from partita._torch.lowering_ambient import surroundings, watched
from partita._torch.lowering_containers import Leaf, Shape
from partita._torch.lowering_gradients import hides_history
from partita._torch.lowering_guards import Guard
from partita.runtime.calls import Calls
from partita.runtime.compilation import Compilation
from partita.runtime.lowering import Lowering
from partita.runtime.module_state import ModuleLook
from partita.runtime.open_sizes import OpenSizes
from partita.runtime.owned_outputs import memory_of
from partita.runtime.recent import Recent
from partita.runtime.rehearsal import Acts
from partita.runtime.signature import Call, Signature, signature_of, unfit_reason
from partita.runtime.variant import Cause, Fit, Variant
from partita.runtime.variants import Variants

__all__ = ["Choice"]


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
class Choice:
    """What one region has seen so far."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        self._body, self._lowering, self._variants = body, lowering, variants
        self._calls = Calls(body)
        self._open_sizes = lowering.open_sizes
        #: The last signature of each kind.
        self._seen: Recent[Signature] = Recent()
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

    def _open_sizes_after(self, signature: Signature) -> OpenSizes:
        """With what differs from the last call of its kind; what others that share functions have seen is theirs."""
        before = self._seen.get(signature.kind)
        return self._open_sizes if before in (None, signature) else self._open_sizes.after(before, signature)

    def _made(
        self, signature: Signature, call: Call, written: tuple[int, ...], acts: Acts, open_sizes: OpenSizes
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
        if call.modules is not None and call.modules.state.interposed is not None:
            self._lowering.report(Cause(f"{call.modules.state.interposed}, which a trace would lose"))
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
