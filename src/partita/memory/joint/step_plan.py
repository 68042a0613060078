"""Plans for a training step of several compiled graphs: the fastest ways of all graphs whose step fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from partita._html import html_facts
from partita.errors import BudgetError
from partita.memory.budget import MemoryBudget, shown_bytes
from partita.memory.joint.part import PartMenu, PartWay
from partita.memory.joint.plan import JointMemoryPlan
from partita.memory.joint.step import RecordedStep, StepBytes, bytes_of_step
from partita.solvers.prices import Way
from partita.solvers.shared_choices import SharedChoices


@final
@dataclass(frozen=True, slots=True)
class StepMoment:
    """The most that is allocated while one graph runs forward or backward."""

    #: "forward" or "backward".
    phase: str
    #: The name of the graph.
    part: str
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class StepPart:
    """What the plan of a step does with one graph."""

    name: str
    #: How often a step calls it.
    calls: int
    #: What one call holds between its forward and its backward, without its inputs and results.
    held_bytes: int
    #: The time that the backward of one call takes to recompute what is not held.
    seconds: float
    #: Which values of the graph are saved.
    plan: JointMemoryPlan = field(repr=False)


@final
@dataclass(frozen=True)
class StepMemoryPlan:
    """What every graph of a step saves for backward, and the peak of the whole step; it prints as a few lines."""

    parts: tuple[StepPart, ...]
    #: The peak of the step in bytes, all that is allocated, and what was allowed.
    peak_bytes: int
    allowed_bytes: int
    #: The peak of the step in which every graph is fastest.
    plain_peak_bytes: int
    #: The smallest peak of any plan.
    smallest_peak_bytes: int
    #: The seconds of all that is recomputed in a step.
    seconds: float
    #: The calls of graphs in the order of the step.
    moments: tuple[StepMoment, ...] = field(repr=False)
    #: What fills the peak, largest first.
    occupants: tuple[tuple[str, int], ...] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return html_facts({}, notes=list(self._lines()))

    def _lines(self) -> Iterator[str]:
        for part in self.parts:
            times = "once" if part.calls == 1 else f"{part.calls} times"
            yield (
                f"{part.name}, called {times}: holds {shown_bytes(part.held_bytes)}, "
                f"{1e3 * part.seconds:.2f} ms to recompute the rest"
            )
        yield (
            f"peak of the step {shown_bytes(self.peak_bytes)} of {shown_bytes(self.allowed_bytes)} allowed; of the "
            f"fastest step {shown_bytes(self.plain_peak_bytes)}, smallest {shown_bytes(self.smallest_peak_bytes)}"
        )
        highest = max(self.moments, key=lambda one: one.bytes)
        yield f"  when: {highest.phase} of {highest.part}"
        for what, size in self.occupants[:6]:
            yield f"  {shown_bytes(size)}: {what}"
        yield f"recomputation takes {1e3 * self.seconds:.2f} ms"


@final
@dataclass(frozen=True, slots=True)
class PlannedWays:
    """The choice for each part, with the bytes that it is known by."""

    ways: dict[int, PartWay]
    peak: int
    plain_peak: int
    smallest_peak: int
    asked: int
    #: The bytes of each moment of each recorded step.
    bytes: tuple[tuple[int, ...], ...]
    #: For each part how many bytes are left at its tightest moment.
    spare: dict[int, int]
    occupants: tuple[tuple[str, int], ...]

    @property
    def fits(self) -> bool:
        return self.peak <= self.asked


def plan_steps(
    steps: Sequence[RecordedStep],
    menus: Mapping[int, PartMenu],
    current: Sequence[Mapping[int, PartWay]],
    *,
    budget: MemoryBudget,
    beside: int = 0,
    names: Mapping[int, str],
) -> PlannedWays:
    """The fastest ways of all parts with which each of these steps fits; those with the smallest peak if none do.

    `current` has the ways in which the parts ran when each step was recorded; `beside` is what else is allocated
    throughout, and how much more than predicted was measured.
    """
    order = sorted({part for step in steps for part in step.parts if part in menus})
    numbers = [bytes_of_step(step, menus, ways) for step, ways in zip(steps, current, strict=True)]
    fixed = [size + beside for one in numbers for size in one.fixed]
    solved = [_joined(part, menus[part], steps, numbers) for part in order]
    choices = SharedChoices(solved, fixed)
    plain = tuple(menus[part].ways.index(menus[part].fastest) for part in order)
    plain_peak, smallest = choices.peak(plain), choices.peak(choices.least)
    asked = budget.bytes(max(plain_peak, smallest))
    chosen = choices.within(asked) or choices.least
    sizes = choices.bytes(chosen)
    ways = {part: menus[part].ways[number] for part, number in zip(order, chosen, strict=True)}
    places = [(step, at) for step, one in enumerate(steps) for at in range(len(one.moments))]
    spare: dict[int, int] = {}
    for (step, at), size in zip(places, sizes, strict=True):
        part = steps[step].calls[steps[step].moments[at][0]].part
        if part in ways:
            spare[part] = min(spare.get(part, asked), asked - size)
    highest = max(range(len(sizes)), key=lambda at: sizes[at])
    own_bytes = {part: menu[number].bytes[highest] for part, menu, number in zip(order, solved, chosen, strict=True)}
    return PlannedWays(
        ways,
        max(sizes),
        plain_peak,
        smallest,
        asked,
        tuple(sizes[first : first + len(one.fixed)] for first, one in zip(_starts(numbers), numbers, strict=True)),
        spare,
        tuple(_occupants(fixed[highest], own_bytes, names)),
    )


def holds(
    planned: PlannedWays,
    step: RecordedStep,
    menus: Mapping[int, PartMenu],
    current: Mapping[int, PartWay],
    *,
    beside: int = 0,
) -> bool:
    """Whether another step fits with these ways as they are, and is no larger than those that they were planned for.

    Then it would change neither what is allowed nor which ways fit.
    """
    order = sorted(part for part in step.parts if part in menus)
    if any(planned.ways.get(part) not in menus[part].ways for part in order):
        return False
    numbers = bytes_of_step(step, menus, current)
    fixed = [size + beside for size in numbers.fixed]
    choices = SharedChoices([numbers.menus[part] for part in order], fixed)
    chosen = [menus[part].ways.index(planned.ways[part]) for part in order]
    plain = [menus[part].ways.index(menus[part].fastest) for part in order]
    return choices.peak(chosen) <= planned.asked and choices.peak(plain) <= planned.plain_peak


def infeasible(planned: PlannedWays) -> BudgetError:
    """What is raised if no ways fit."""
    filled = ", ".join(f"{shown_bytes(size)} of {what}" for what, size in planned.occupants[:4])
    return BudgetError(
        f"no choice of saved values takes at most {shown_bytes(planned.asked)} in the whole step, whose graphs are "
        f"planned together; the smallest peak is {shown_bytes(planned.smallest_peak)} ({planned.smallest_peak} bytes): "
        f"{filled}. Allow that much, or use smaller batches",
        smallest=planned.smallest_peak,
    )


def _joined(part: int, menu: PartMenu, steps: Sequence[RecordedStep], numbers: Sequence[StepBytes]) -> list[Way]:
    """The ways of a part with the moments of all steps, one after another."""
    found = []
    for number in range(len(menu.ways)):
        sizes: tuple[int, ...] = ()
        seconds = 0.0
        for step, one in zip(steps, numbers, strict=True):
            if part in step.parts:
                sizes += one.menus[part][number].bytes
                seconds += one.menus[part][number].seconds
            else:
                sizes += (0,) * len(one.fixed)
        found.append(Way(seconds, sizes))
    return found


def _starts(numbers: Sequence[StepBytes]) -> Iterator[int]:
    at = 0
    for one in numbers:
        yield at
        at += len(one.fixed)


def _occupants(fixed: int, own: Mapping[int, int], names: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    found = [(names[part], size) for part, size in own.items() if size > 0]
    found.append(("parameters, gradients, values between graphs and all else that no plan changes", fixed))
    yield from sorted(found, key=lambda pair: -pair[1])
