"""What a byte costs at each moment of a step: prices that bound how fast any plan within some room can be.

With prices each part of a step can be chosen by itself: the way with the least sum of seconds and of what its bytes
cost. These sums, less what the room is worth, are a time that no plan within the room beats, whatever the prices are
(it is the Lagrange dual). A way that costs more than the best of its part makes every plan with it slower by as much at
least, so a search may leave out what becomes slower than a plan that is known, and keeps the rest best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import add
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a part: how long all of its runs take, and the bytes that they add to each moment of the step."""

    seconds: float
    bytes: tuple[int, ...]


Menus: TypeAlias = Sequence[Sequence[Way]]


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """How much slower than the bound every plan is at least that has some way of a part: the excesses of its ways."""

    excesses: tuple[tuple[float, ...], ...]
    #: A time that no plan within the room beats.
    seconds: float
    #: The fastest plan within the room that is known, and its time.
    plan: tuple[int, ...]
    known: float

    @property
    def most(self) -> float:
        """A plan of which the excesses add up to more is slower than the one that is known."""
        # The seconds are rounded sums.
        return self.known - self.seconds + 1e-9 * abs(self.known)

    def with_plan(self, plan: tuple[int, ...], seconds: float) -> Bound:
        """The bound with another plan within the room, if that is faster."""
        return Bound(self.excesses, self.seconds, plan, seconds) if seconds < self.known else self


#: Prices are improved so often, and if that was in vain so often one after another, steps become half as long.
_ROUNDS, _IN_VAIN = 60, 4


def bound_of(
    menus: Menus, fixed: Sequence[int], room: int, *, plan: tuple[int, ...], fits: Callable[[tuple[int, ...]], bool]
) -> Bound:
    """A bound by prices that rise where more than `room` is taken, and fall where there is room left.

    `plan` is one that fits. `fixed` has the bytes of each moment that no choice changes. What a plan takes is at least
    the sum of these and of its ways' bytes at each moment; it may be more, so `fits` says whether it is in the room.
    """
    known = seconds_of_ways(menus, plan)
    prices, best, bound = dict[int, float](), dict[int, float](), -inf
    length, in_vain = 1.0, 0
    for _ in range(_ROUNDS):
        costs = _costs(menus, prices)
        chosen = tuple(some.index(min(some)) for some in costs)
        sizes = bytes_of_ways(menus, fixed, chosen)
        found = sum(map(min, costs)) + sum(price * (fixed[at] - room) for at, price in prices.items())
        if fits(chosen) and (seconds := seconds_of_ways(menus, chosen)) < known:
            plan, known = chosen, seconds
        if found > bound:
            bound, best, in_vain = found, prices, 0
        elif (in_vain := in_vain + 1) == _IN_VAIN:
            prices, length, in_vain = best, length / 2, 0
            continue
        highest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        over = {at: sizes[at] - room for at in dict.fromkeys((*prices, highest)) if sizes}
        square = sum(size * size for at, size in over.items() if size > 0 or prices.get(at, 0) > 0)
        if square == 0 or known <= bound:
            break
        step = length * (known - bound) / square
        prices = {at: max(prices.get(at, 0.0) + step * size, 0.0) for at, size in over.items()}
    return Bound(tuple(_above_least(some) for some in _costs(menus, best)), bound, plan, known)


def _costs(menus: Menus, prices: dict[int, float]) -> list[list[float]]:
    """For each part and each way its seconds, and what its bytes cost."""
    paid = [(at, price) for at, price in prices.items() if price > 0]
    return [[way.seconds + sum(price * way.bytes[at] for at, price in paid) for way in menu] for menu in menus]


def _above_least(costs: Sequence[float]) -> tuple[float, ...]:
    least = min(costs)
    return tuple(cost - least for cost in costs)


def bytes_of_ways(menus: Menus, fixed: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The bytes of each moment."""
    sums = list(fixed)
    for menu, number in zip(menus, chosen, strict=True):
        sums = list(map(add, sums, menu[number].bytes))
    return tuple(sums)


def seconds_of_ways(menus: Menus, chosen: Sequence[int]) -> float:
    """The time of all parts."""
    return sum(menu[number].seconds for menu, number in zip(menus, chosen, strict=True))
