"""The choice of what runs for a call: a function that was compiled for calls like it, a new one, or the body itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.fx import GraphModule

from partita._torch.lowering_ambient import surroundings, watched
from partita._torch.lowering_containers import Leaf, Shape
from partita._torch.lowering_guards import Guard
from partita.runtime.calls import Calls
from partita.runtime.compilation import Compilation
from partita.runtime.lowering import Lowering
from partita.runtime.owned_outputs import memory_of
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
    training: tuple[bool, ...]
    #: The places of values that the body writes.
    written: tuple[int, ...]

    def serves(self, call: Call) -> bool:
        return (
            self.shapes == call.shapes
            and self.training == call.training
            and self.guard.accepts(call.values)
            and self.variant.allows(call.values)
        )


@final
class Choice:
    """What one region has seen so far."""

    def __init__(self, body: GraphModule, lowering: Lowering, variants: Variants) -> None:
        self._body, self._lowering, self._variants = body, lowering, variants
        self._calls = Calls(body)
        self._open_sizes = lowering.open_sizes
        #: The last signature of each kind.
        self._seen: dict[object, Signature] = {}
        self._last: _LastUse | None = None
        variants.serve(self)

    def of(self, inputs: Sequence[Any]) -> tuple[Variant, Sequence[Any]] | None:
        """The variant for these inputs, and the values to call it with; None where the body itself must run."""
        call, last = self._calls.of(inputs), self._last
        if last is None or not last.serves(call):
            call = self._calls.taken_apart(call)
            last = self._looked_up(call)
        if last is None or last.variant.function is None or (last.written and _overlap(call.values, last.written)):
            return None
        return last.variant, call.values

    def _looked_up(self, call: Call) -> _LastUse | None:
        """The variant for these values, found or made; None where the body must run and nobody is to blame."""
        if watched() or not self._is_fit(call):
            return None
        around = surroundings()
        written = (*call.places_of(self._lowering.written), *self._calls.state_that_may_be_written(call))
        if not around.inference and (around.grad or written) and any(map(_is_inference_tensor, call.values)):
            # Compiled code might save or write a tensor that can be neither, where the body would not.
            return None
        signature = signature_of(call, around, written=written)
        self._note_changes(signature)
        variant = self._variants.find(signature, call.values) or self._made(signature, call, written)
        if variant.cause is not None:
            self._lowering.report(variant.cause)
        guard = variant.fit.guard(call.values, written=written)
        self._last = _LastUse(guard, variant, call.shapes, call.training, written)
        return self._last

    def _note_changes(self, signature: Signature) -> None:
        """Opens what differs from the last call of its kind; what others that share functions have seen is theirs."""
        before = self._seen.get(signature.kind)
        if before is not None and before != signature:
            self._open_sizes = self._open_sizes.after(before, signature)
        self._seen[signature.kind] = signature

    def _made(self, signature: Signature, call: Call, written: tuple[int, ...]) -> Variant:
        lowering, slots = self._lowering, self._calls.state.slots
        if signature.needs_gradients and not lowering.trains:
            return self._variants.give_up(signature, Cause(_WITHOUT_GRADIENTS))
        hooked = self._calls.state.hooked()
        if hooked is not None:
            cause = Cause(f"a {hooked} in it runs hooks, which a trace would lose")
            return Variant(Fit.of_kind(signature), None, cause=cause)

        def begin() -> Compilation:
            keys = self._open_sizes.of(signature, call)
            return Compilation(
                self._variants.compiler, self._body, slots, signature, call.values, lowering.acts, written, keys
            )

        try:
            return self._variants.find_or_make(signature, call.values, begin, title=lowering.title)
        except Exception as error:
            cause = Cause.of(error)
            lowering.report(cause, error)
            return self._variants.give_up(signature, cause)

    def _is_fit(self, call: Call) -> bool:
        """Whether code can be made for such values; a tensor of another class does its own things, and is no fault."""
        if any(not isinstance(call.shapes[place], Leaf) for place in self._lowering.written):
            return False  # What is put into a container would only be put into a copy.
        for place, value in enumerate(call.values):
            reason = unfit_reason(value)
            if reason is not None:
                if not isinstance(value, Tensor):
                    cause = Cause(f"input {place} {reason}; only tensors and numbers can be compiled for")
                    self._lowering.report(cause)
                return False
        return True


def _overlap(values: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether a value that is written shares memory with another: code is made for values that do not."""
    keys = [memory_of(value) for value in values]
    return any(keys.count(keys[place]) > 1 for place in written)


def _is_inference_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


_WITHOUT_GRADIENTS = "gradients are needed, which it does not give; call the program under torch.no_grad()"
