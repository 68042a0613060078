"""What is kept apart: nodes of different modes, devices or labels, which never share a region."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, final

import torch
from torch.fx import Node

from partita.errors import OptionError
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.policies.asking import asked_label

__all__ = ["Apart", "KeptApart"]

#: A function by whose answers nodes are kept apart.
Apart: TypeAlias = Callable[[Node], Hashable]


@final
class KeptApart:
    """By what the regions of a program are kept apart."""

    def __init__(self, program: Program, *, modes: bool, devices: bool, label: Apart | None) -> None:
        self._nodes = program.index.nodes
        self._traits: list[_Trait] = []
        if modes:
            self._traits.append(_Trait("mode", "modes_apart=False", program.modes.at))
        if devices:
            self._traits.append(_Trait("device", "devices_apart=False", partial(_device, program)))
        if label is not None:
            self._traits.append(_Trait("answer of `apart`", "other answers", partial(_label, program, label)))

    def shared_by(self, numbers: Sequence[int]) -> Hashable:
        """What the nodes of a unit have in common and share with their region; raises where they differ."""
        if len(numbers) == 1:
            return tuple([trait.of(numbers[0]) for trait in self._traits])
        return tuple([self._only(trait, numbers) for trait in self._traits])

    def _only(self, trait: _Trait, numbers: Sequence[int]) -> Hashable:
        """The one value that is found; None, where nothing is known of a node, goes with any."""
        found: dict[Hashable, int] = {}
        for number in numbers:
            value = trait.of(number)
            if value is not None:
                found.setdefault(value, number)
        if len(found) <= 1:
            return next(iter(found), None)
        (one, first), (other, second) = list(found.items())[:2]
        raise OptionError(
            f"`together` puts {self._nodes[first].name!r} ({one}) and {self._nodes[second].name!r} ({other}) into one "
            f"group, but a region holds one {trait.name}; make a group of each, or give {trait.remedy}"
        )


class _Trait(NamedTuple):
    """Something that a region has one of, what to give so that it may have several, and how a node's is found."""

    name: str
    remedy: str
    of: Callable[[int], Hashable]


def _label(program: Program, label: Apart, number: int) -> Hashable:
    return asked_label(label, program.index.nodes[number], role="`apart`")


def _device(program: Program, number: int) -> str | None:
    """The device that a node computes on: that of its value, or else of the first tensor that it reads."""
    index = program.index
    for candidate in (number, *index.inputs(number)):
        value = value_of(index.nodes[candidate])
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                return str(item.device)
    return None
