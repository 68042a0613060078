"""Backwards of compiled regions of whose results nothing is used: their inputs get no gradients, as in eager mode.

AOTAutograd computes zeros there, and optimizers treat these differently. A hook of the user cannot take None: it gets
zeros, where eager mode does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor, nn

from partita._torch.functorch import count_levels
from partita.lowering._torch.gradients import UnusedGradients, leads_to_hook

#: Inputs of a call that may have been computed, by their places.
Held: TypeAlias = "Mapping[int, Computed]"


def without_unused_gradients(
    function: Callable[..., Sequence[Any]], links: Sequence[frozenset[int]]
) -> Callable[..., Sequence[Any]]:
    """A function like a compiled one, with the wrappers of AOTAutograd, whose inputs may be left without gradients.

    `links` are the places of the inputs that each result depends on.
    """

    def call(*args: Any) -> Sequence[Any]:
        if count_levels() or not torch.is_grad_enabled():
            return function(*args)
        # Calls of equal regions share the function, and their inputs may be wired in different ways.
        unused = UnusedGradients(links, {})
        edges = unused.before(args)
        outputs = function(*args)
        unused.hook_backward(edges, outputs, args)
        return outputs

    return call


@final
@dataclass(frozen=True, slots=True)
class HookedInputs:
    """Which inputs of an autograd function have hooks when its backward runs, or were computed from such."""

    #: The places of tensors, in the order of `next_functions`.
    tensors: tuple[int, ...]
    #: The places of inputs with gradients that are no parameters: some other function may have computed them.
    computed: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, args: Sequence[Any], requiring: Collection[int]) -> HookedInputs:
        """Those of a function that is always called with values of the kinds of these."""
        tensors = tuple(place for place, arg in enumerate(args) if isinstance(arg, Tensor))
        computed = (place for place in tensors if place in requiring and not isinstance(args[place], nn.Parameter))
        return cls(tensors, tuple(computed), len(args))

    def hold(self, args: Sequence[Any]) -> Held:
        """What the backward of a call needs: parameters are found from the function itself."""
        return {place: Computed(ref(arg := args[place]), arg.shape, arg.dtype, arg.device) for place in self.computed}

    def gradients_of_nothing(self, function: Any, held: Held) -> tuple[Any, ...]:
        """The gradient of each input where no result is used."""
        found: list[Any] = [None] * self.count
        for place, (before, _) in zip(self.tensors, function.next_functions, strict=True):
            one, leaf = held.get(place), getattr(before, "variable", None)
            tensor: Any = leaf if one is None else one.tensor()
            if (tensor is not None and tensor._backward_hooks) or leads_to_hook(before):
                found[place] = torch.zeros_like(tensor) if one is None else one.zeros()
        return tuple(found)


@final
class Computed(NamedTuple):
    """An input that another function may have computed, which may be gone when the backward runs."""

    tensor: Callable[[], Any]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """A gradient of it that is zero."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
