"""The random state around what is kept: a draw that is not made again moves it, and a backward moves it for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

__all__ = ["KeptDraws", "generators_put_back"]


@final
class KeptDraws:
    """The states of the default generators before the first and after the last draw of a kept part, by device.

    What only may draw, such as attention without dropout, leaves nothing here.
    """

    __slots__ = ("_after", "_before")

    def __init__(self) -> None:
        self._before: dict[torch.device, Tensor] = {}
        self._after: dict[torch.device, Tensor] = {}

    def noted(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives that runs for the first time."""
        if not _may_draw(operator):
            return operator(*args, **kwargs)
        before = _states(_devices(args, kwargs))
        result = operator(*args, **kwargs)
        after = _states(before)
        for device in before:
            if not _same(before[device], after[device]):
                self._before.setdefault(device, before[device])
                self._after[device] = after[device]
        return result

    def devices(self) -> Iterable[torch.device]:
        """Where the part has drawn."""
        return self._before

    def make_again(self) -> None:
        """What is drawn next is what the part has drawn."""
        _set(self._before)

    def pass_over(self) -> None:
        """What is drawn next is what was drawn after the part."""
        _set(self._after)


@contextmanager
def generators_put_back(devices: Iterable[torch.device]) -> Iterator[None]:
    """Whatever is drawn or set meanwhile, the generators of these devices go on as if nothing had been."""
    before = _states(devices)
    try:
        yield
    finally:
        _set(before)


@cache
def _may_draw(operator: Any) -> bool:
    """Whether an operator may move a default generator; one of somebody else's, or one with a body, need not say so."""
    if not isinstance(operator, OpOverload) or operator.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in operator.tags


def _devices(args: Any, kwargs: Any) -> list[torch.device]:
    leaves = pytree.tree_leaves((args, kwargs))
    found = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    devices = [torch.device("cpu"), *(device for device in found if isinstance(device, torch.device))]
    return [device for device in dict.fromkeys(devices) if _has_generator(device)]


def _states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {device: _module_of(device).get_rng_state(*_index_of(device)) for device in devices}


def _set(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        _module_of(device).set_rng_state(state, *_index_of(device))


def _same(one: Tensor, other: Tensor) -> bool:
    with no_dispatch():  # States are real, whatever the tensors of the body are.
        return torch.equal(one, other)


def _has_generator(device: torch.device) -> bool:
    return device.type != "meta" and hasattr(_module_of(device), "get_rng_state")


def _module_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in ("cpu", "mps") else (device,)
