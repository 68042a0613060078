"""Switches between backends: small regions go to a later backend that takes them whole, or to the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor, nn
from torch.fx import Node

from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.errors import CallbackError, OptionError
from partita.policies.capability import Capability, Check, Units
from partita.policies.legalize import call_user_function
from partita.program.program import Program
from partita.regions import Region
from partita.regions.region import Reason
from partita.solvers.relation import REFUSED

#: What a switch to a region costs, as the bytes of results that it has to compute to be worth it: one number for all,
#: or a function of a region.
SwitchCost: TypeAlias = int | Callable[[Region], int]


def check_switch_cost(cost: object) -> None:
    """Raises unless this is a number of bytes or a function."""
    is_number = type(cost) is int and cost >= 0
    if not is_number and not callable(cost):
        raise OptionError(
            f"`switch_cost` is a number of bytes, or a function of a region that returns it, not {cost!r}"
        )


def _bytes_computed(node: Node) -> int | None:
    """The bytes of a result, for the sizes that symbols were traced with; None where nothing was traced."""
    value = value_of(node)
    if value is None:
        return None
    tensors = [one for one in (value if isinstance(value, tuple | list) else (value,)) if isinstance(one, Tensor)]
    return sum(int(math.prod(hint_of(size) for size in one.shape)) * one.element_size() for one in tensors)


class Switching:
    """Hands over what is not worth a switch, one backend after the other, in the order of preference."""

    def __init__(self, program: Program, capabilities: Sequence[Capability], cost: SwitchCost) -> None:
        self._nodes, self._items = program.index.nodes, program.projecting
        submodules: dict[str, nn.Module] = dict(program.graph_module.named_modules(remove_duplicate=False))
        self._checks = [Check.of(one, submodules) for one in capabilities]
        self._cost = cost

    def handed_over(self, units: Units, parts_of: Callable[[Units], list[list[int]]]) -> Units:
        """The units with other kinds; `parts_of` returns the units of each region that they would make."""
        for position in range(len(self._checks)):
            members = units.members()
            kinds, reasons = list(units.kinds), dict(units.reasons)
            keys = list(units.kind_keys)
            for part in parts_of(units):
                accepting, shared = keys[units.kinds[part[0]]]
                if accepting != position:
                    continue
                numbers = sorted(number for unit in part for number in members[unit])
                nodes = [self._nodes[number] for number in numbers]
                operators = [self._nodes[number] for number in numbers if number not in self._items]
                reason = self._why_not_worth_it(Region(self._checks[position].name, tuple(nodes)), operators)
                if reason is None:
                    continue
                later = self._later_taker(operators, position)
                if later is None:
                    reasons.update(dict.fromkeys(nodes, reason))
                    kind = REFUSED
                else:
                    key = (later, shared)
                    if key not in keys:
                        keys.append(key)
                    kind = keys.index(key)
                for unit in part:
                    kinds[unit] = kind
            units = replace(units, kinds=kinds, kind_keys=keys, reasons=reasons)
        return units

    def _why_not_worth_it(self, region: Region, operators: Sequence[Node]) -> Reason | None:
        found, cost = [_bytes_computed(node) for node in operators], self._cost
        if None in found:
            return None  # What it computes is not known.
        computed = sum(size or 0 for size in found)
        if not isinstance(cost, int):
            cost = call_user_function(cost, region, node=operators[0], role="function `switch_cost`")
            if type(cost) is not int:
                raise CallbackError(f"`switch_cost` returned {cost!r} for a region; return a number of bytes")
        if computed >= cost:
            return None
        why = f"its region computes {computed} bytes, and a switch to {region.name} costs {cost}"
        return Reason(why, kind="not worthwhile", why=why)

    def _later_taker(self, nodes: Sequence[Node], position: int) -> int | None:
        """The next capability that accepts all of the nodes."""
        later = range(position + 1, len(self._checks))
        accepts = (at for at in later if all(self._checks[at].refusal(node) is None for node in nodes))
        return next(accepts, None)
