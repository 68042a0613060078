"""Guards: whether a call is like the one that a compiled function was last used for, told in a microsecond.

They are quick and strict: what they refuse may still fit, and is looked at again in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, final

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad

from partita._torch.lowering_ambient import default_device

try:
    from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
except ImportError:
    GlobalStateGuard = TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["Guard"]

#: The sizes and strides that an input must have; None where any will do.
Dimensions = tuple[Sequence[int | None], Sequence[int | None]]


@final
class Guard:
    """Takes inputs that look like `values`, in surroundings like those now, where `dimensions` may leave sizes open.

    `constants` are the places of inputs that must be equal to those in `values`, `integers` of those that need not be.
    """

    __slots__ = (
        "_constants",
        "_count",
        "_depth",
        "_device",
        "_inference",
        "_integers",
        "_is_able",
        "_leaves",
        "_state",
        "_take",
        "_tensors",
    )

    def __init__(
        self,
        values: Sequence[Any],
        dimensions: Sequence[Dimensions | None],
        *,
        constants: Sequence[int] = (),
        integers: Sequence[int] = (),
        leaves: Sequence[int] = (),
    ) -> None:
        tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        chosen = [dimensions[place] or ((), ()) for place in tensors]
        self._take = None if len(tensors) == len(values) else _taker(tensors)
        self._count = len(values)
        self._constants = tuple((place, type(values[place]), _exact(values[place])) for place in constants)
        self._integers = tuple(integers)
        self._leaves = tuple((place, values[place].is_leaf) for place in leaves)
        self._depth, self._device = _len_torch_function_stack(), default_device()
        self._inference = torch.is_inference_mode_enabled()
        self._is_able = TensorGuards is not None
        if self._is_able:
            self._state: Any = GlobalStateGuard()
            make: Any = TensorGuards  # Its stub has other types than it takes.
            self._tensors: Any = make(
                *(values[place] for place in tensors),
                dynamic_dims_sizes=[list(sizes) for sizes, _ in chosen],
                dynamic_dims_strides=[list(strides) for _, strides in chosen],
            )

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether what was compiled for such inputs fits these."""
        if (
            not self._is_able
            or len(values) != self._count
            or _len_torch_dispatch_stack()
            or _len_torch_function_stack() != self._depth
            or forward_ad._current_level >= 0
            or _is_tracing()
            or not self._state.check()
        ):
            return False
        if self._depth and default_device() != self._device:
            return False
        if not self._tensors.check(*(values if self._take is None else self._take(values))):
            return False
        if torch.is_inference_mode_enabled() is not self._inference:
            return False
        for place, kind, exact in self._constants:
            if type(values[place]) is not kind or _exact(values[place]) != exact:
                return False
        for place in self._integers:
            if type(values[place]) is not int:
                return False
        return not self._leaves or all(_is_leaf(values[place]) is leaf for place, leaf in self._leaves)


def _is_leaf(value: Tensor) -> bool | None:
    """Whether a tensor has no history; None where autograd refuses to tell."""
    try:
        return value.is_leaf
    except RuntimeError:
        return None


def _exact(value: Any) -> Any:
    """A constant as something that equals only itself; 0.0 and -0.0 are equal, and nan is not."""
    return repr(value) if isinstance(value, float | complex) else value


def _taker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)
