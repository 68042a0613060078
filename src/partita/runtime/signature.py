"""A signature: what compiled code must know of one call, beside the contents of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from partita._torch.lowering_ambient import Surroundings
from partita._torch.lowering_containers import Shape, leaf_count
from partita.runtime.module_state import ModuleLook, Slot

__all__ = ["Call", "Constant", "Signature", "TensorLook", "signature_of", "unfit_reason"]


@final
@dataclass(frozen=True, slots=True)
class TensorLook:
    """What a tensor looks like from outside; `leaf` matters only where the body writes it, with gradients."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    leaf: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def kind(self) -> object:
        """Everything but sizes and strides."""
        return self.dtype, self.device, self.requires_grad, self.leaf, len(self.sizes)


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is no tensor; equal to another if the two are of one type and print alike."""

    type: type
    text: str

    @property
    def kind(self) -> object:
        """The type."""
        return self.type


Look: TypeAlias = TensorLook | Constant


class Call(NamedTuple):
    """The values that compiled code is called with, and how the inputs and modules of the body give them."""

    values: Sequence[Any]
    shapes: tuple[Shape, ...]
    #: The modules of the body; None if it calls none.
    modules: ModuleLook | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Where the values come from that are no inputs; they are the last ones."""
        return () if self.modules is None else self.modules.state.slots

    @property
    def input_count(self) -> int:
        """How many of the values come from inputs."""
        return sum(map(leaf_count, self.shapes))

    def places_of(self, inputs: Collection[int]) -> Iterator[int]:
        """The places of the values in these inputs."""
        start = 0
        for number, shape in enumerate(self.shapes):
            end = start + leaf_count(shape)
            if number in inputs:
                yield from range(start, end)
            start = end

    def state_that_may_be_written(self) -> Iterator[int]:
        """The places of what modules may write: anything but parameters."""
        slots = enumerate(self.slots, len(self.values) - len(self.slots))
        return (place for place, slot in slots if slot.table != "_parameters")


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """The surroundings of a call and the looks of its values: those in the inputs, then the state of modules.

    `shapes` tell how the inputs are made up of values. Of the modules in the body, `modules` is the key, and `training`
    what they are set to.
    """

    surroundings: Surroundings
    looks: tuple[Look, ...]
    shapes: tuple[Shape, ...]
    modules: Hashable = ()
    training: tuple[bool, ...] = ()

    @property
    def kind(self) -> object:
        """Everything but sizes, strides and the values of constants: two calls of one kind differ in size at most."""
        return self.surroundings, self.shapes, self.modules, self.training, tuple(look.kind for look in self.looks)

    @property
    def family(self) -> object:
        """What two calls have in common that differ in sizes, in constants, in how many values are in containers, and
        in how modules are set; a program may go through such changes without end."""
        return self.surroundings, frozenset(look.kind for look in self.looks)

    @property
    def needs_gradients(self) -> bool:
        """Whether anyone may ask for a backward pass."""
        asks = (isinstance(look, TensorLook) and look.requires_grad for look in self.looks)
        return self.surroundings.has_gradients and any(asks)


def signature_of(
    call: Call, surroundings: Surroundings, *, written: Collection[int] = (), picks_kernels: bool = False
) -> Signature:
    """The signature of a call, of whose values those at the places in `written` are written.

    Where kernels are picked as eager mode does, it matters which values require gradients although none flow: `linear`
    is one product or several.
    """
    grad = surroundings.has_gradients
    looks = (
        _look(value, grad=grad, is_written=place in written, is_marked=grad or picks_kernels)
        for place, value in enumerate(call.values)
    )
    if call.modules is None:
        return Signature(surroundings, tuple(looks), call.shapes)
    return Signature(surroundings, tuple(looks), call.shapes, call.modules.state.key, call.modules.training)


def unfit_reason(value: Any) -> str | None:
    """Why no code can be made for a value as an input; None if it can."""
    if type(value) in _CONSTANTS or isinstance(value, torch.dtype | torch.device):
        return None
    if type(value) not in _TENSORS:
        return f"is of type {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"has the layout {str(value.layout).removeprefix('torch.')}"
    if value.is_quantized:
        return "is quantized"
    if value.is_conj() or value.is_neg():
        return "is conjugated or negated lazily"
    return None


_CONSTANTS = (int, float, complex, bool, str, type(None))
_TENSORS = (Tensor, nn.Parameter)


def _look(value: Any, *, grad: bool, is_written: bool, is_marked: bool) -> Look:
    if not isinstance(value, Tensor):
        return Constant(type(value), repr(value))
    return TensorLook(
        value.dtype,
        value.device,
        is_marked and value.requires_grad,
        not (grad and is_written) or value.is_leaf,
        tuple(value.shape),
        value.stride(),
    )
