"""A training step of several compiled graphs: its bytes at each moment as numbers, and the choices that fit a budget.

A moment is the forward or the backward of one call of a graph. What is allocated then is what no choice changes
(parameters, gradients that are finished, values that other code keeps alive), what the call itself needs, and what the
calls hold that have run forward and not yet backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from partita.memory.joint.part import PartMenu, PartWay
from partita.solvers.prices import Way


@final
@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a graph: the numbers of the values that it got and returned; None for what is no tensor."""

    part: int
    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]
    #: The moment from which on what it has saved was freed, if its backward did not run.
    freed: int | None = None


@final
@dataclass(frozen=True, slots=True)
class RecordedValue:
    """One storage that a call got or returned."""

    bytes: int
    #: Its bytes at each moment, from the first one on at which it was known; 0 where it was freed.
    sizes: tuple[int, ...]
    first: int
    #: Whether it is a parameter, or another leaf that gets a gradient.
    is_parameter: bool
    requires_grad: bool
    #: The bytes of a gradient that was there before the step.
    gradient_bytes: int = 0

    @property
    def is_resident(self) -> bool:
        """Whether it was allocated all the time, as far as it was seen."""
        return all(self.sizes[self.first :])


@final
@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What a step did: its calls, its moments in order, and the storages that passed between calls.

    A moment is the number of a call, and whether it is its forward.
    """

    calls: tuple[RecordedCall, ...]
    moments: tuple[tuple[int, bool], ...]
    values: tuple[RecordedValue, ...]
    #: What was allocated before the step beside the values; 0 where the device has no count.
    other_bytes: int = 0

    @property
    def parts(self) -> frozenset[int]:
        """The graphs that were called."""
        return frozenset(call.part for call in self.calls)


@final
@dataclass(frozen=True, slots=True)
class StepBytes:
    """The numbers of a step: what no choice changes, and what each way of each part adds, for each moment."""

    fixed: tuple[int, ...]
    menus: dict[int, tuple[Way, ...]]


def bytes_of_step(step: RecordedStep, menus: Mapping[int, PartMenu], current: Mapping[int, PartWay]) -> StepBytes:
    """The numbers of a step that was recorded while its parts ran in the `current` ways."""
    return _Numbers(step, menus, current).found()


#: A result of so few bytes is a loss.
_NUMBER_BYTES = 16


class _Numbers:
    def __init__(self, step: RecordedStep, menus: Mapping[int, PartMenu], current: Mapping[int, PartWay]) -> None:
        self.step, self.menus, self.current = step, menus, current
        self.count = len(step.moments)
        self.forward = {call: at for at, (call, is_forward) in enumerate(step.moments) if is_forward}
        self.backward = {call: at for at, (call, is_forward) in enumerate(step.moments) if not is_forward}
        self.maker = {
            value: number for number, call in enumerate(step.calls) for value in call.results if value is not None
        }
        #: For each value the moments at which it is allocated whatever is chosen.
        self.always = [set(self._seen(number)) for number in range(len(step.values))]
        for number, call in enumerate(step.calls):
            if call.part in menus:
                for value in self._saved_in_all_ways(call):
                    self.always[value].update(self._held(number))

    def found(self) -> StepBytes:
        fixed = [self.step.other_bytes] * self.count
        for number, value in enumerate(self.step.values):
            for at in self.always[number]:
                fixed[at] += value.sizes[at] or value.bytes
            for at in self._gradient(number):
                fixed[at] += value.bytes
        for call, at in self.backward.items():
            if (menu := self.menus.get(self.step.calls[call].part)) is not None:
                fixed[at] += menu.tangent_bytes
        ways = {part: tuple(self._way(part, way) for way in self.menus[part].ways) for part in sorted(self.menus)}
        return StepBytes(tuple(fixed), ways)

    def _way(self, part: int, way: PartWay) -> Way:
        sizes = [0] * self.count
        calls = [number for number, call in enumerate(self.step.calls) if call.part == part]
        for number in calls:
            for at in self._held(number):
                sizes[at] += way.held
            sizes[self.forward[number]] += way.forward
            if number in self.backward:
                # It counts what is held, and results that are saved.
                sizes[self.backward[number]] += way.backward - way.held
            for value, is_result in self._saved(self.step.calls[number], way).items():
                counted = self.backward.get(number) if is_result else None
                for at in self._held(number):
                    if (at in self.always[value]) == (at == counted):
                        sizes[at] += -self.step.values[value].bytes if at == counted else self.step.values[value].bytes
        return Way(way.seconds * len(calls), tuple(sizes))

    def _held(self, call: int) -> range | list[int]:
        """The moments at which a call holds what it has saved; without a backward it may be held from step to step."""
        if call not in self.backward:
            freed = self.step.calls[call].freed
            if freed is not None:
                return range(self.forward[call] + 1, freed)
            return [at for at in range(self.count) if at != self.forward[call]]
        return range(self.forward[call] + 1, self.backward[call] + 1)

    def _saved(self, call: RecordedCall, way: PartWay) -> dict[int, bool]:
        """The values that a call saves in a way, and whether they are its own results; parameters are none of them."""
        found: dict[int, bool] = {}
        for numbers, values, is_result in ((way.inputs, call.arguments, False), (way.results, call.results, True)):
            for at in numbers:
                value = values[at] if at < len(values) else None
                if value is not None and not self._is_state(value):
                    found.setdefault(value, is_result)
        return found

    def _saved_in_all_ways(self, call: RecordedCall) -> set[int]:
        """The values among a call's inputs that it saves whatever is chosen."""
        each = [
            {value for value, own in self._saved(call, way).items() if not own} for way in self.menus[call.part].ways
        ]
        return set.intersection(*each)

    def _is_state(self, number: int) -> bool:
        value = self.step.values[number]
        return value.is_parameter or (number not in self.maker and value.is_resident)

    def _seen(self, number: int) -> list[int]:
        """The moments at which a value was allocated, without those that only a choice explains."""
        value = self.step.values[number]
        if self._is_state(number):
            return [at for at in range(self.count) if (value.is_resident if at < value.first else value.sizes[at])]
        explained: set[int] = set()
        for at, call in enumerate(self.step.calls):
            way = self.current.get(call.part)
            if way is not None and number in self._saved(call, way):
                explained.update(self._held(at))
        read = {self.forward[at] for at, call in enumerate(self.step.calls) if number in call.arguments}
        return [at for at in range(value.first, self.count) if value.sizes[at] and (at in read or at not in explained)]

    def _gradient(self, number: int) -> list[int]:
        """The moments at which the gradient of a value is allocated, beside those that make or take it."""
        value = self.step.values[number]
        if not value.requires_grad:
            return []
        if value.gradient_bytes:
            return list(range(self.count))
        made = [
            self.backward[at]
            for at, call in enumerate(self.step.calls)
            if at in self.backward and number in call.arguments
        ]
        if not made and number in self.maker and value.bytes <= _NUMBER_BYTES and self.maker[number] in self.backward:
            # Who calls `backward` holds the gradient of the loss.
            return list(range(self.backward[self.maker[number]] + 1, self.count))
        if not made and value.is_parameter and value.is_resident and self.backward:
            # What reads it is not compiled, so that its gradient may come at any time.
            return list(range(min(self.backward.values()), self.count))
        if not made or (value.is_parameter and not value.is_resident):
            return []  # What gathers parameters takes care of their gradients.
        if value.is_parameter:
            return list(range(min(made) + 1, self.count))
        taken = self.backward.get(self.maker.get(number, -1))
        return [] if taken is None else list(range(min(made) + 1, taken))
