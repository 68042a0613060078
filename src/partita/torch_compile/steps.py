"""Training steps of several graphs: which graphs a step calls, and one memory budget for all of them.

The graphs that torch.compile makes with one mapping of options share a budget. A step begins with a forward call when
no backward is left to run. What a new kind of step does is recorded once. Unless it fits as its graphs are planned
already, all graphs are planned together then, and those whose plan changes are compiled once more at their next call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from partita.memory.budget import MemoryBudget, check_device_has, shown_bytes
from partita.memory.joint.part import PartMenu, PartWay
from partita.memory.joint.plan import JointMemoryPlan
from partita.memory.joint.step import RecordedStep
from partita.memory.joint.step_plan import (
    PlannedWays,
    StepMemoryPlan,
    StepMoment,
    StepPart,
    holds,
    infeasible,
    plan_steps,
)
from partita.torch_compile._torch.calls import backward_of, next_function_number, watch_backward
from partita.torch_compile.step_record import StepRecorder

log = logging.getLogger(__name__)

#: Dynamo does not trace this module: it watches what runs.
DYNAMO_SKIPS = True


class Part(Protocol):
    """A compiled graph whose plan can change."""

    #: Where in the model it is, for messages.
    name: str
    #: The GPU that it runs on, if it does.
    device: torch.device | None
    on_plan: Callable[[Any], object] | None

    @property
    def budget(self) -> MemoryBudget: ...
    @property
    def communication_bytes(self) -> int: ...
    @property
    def fixed_bytes(self) -> int:
        """What libraries allocate at the first step."""

    def model(self) -> nn.Module | None:
        """The outermost module that ran when it was compiled."""

    def bytes_to_come(self) -> int:
        """The bytes of the optimizer's state that are not allocated yet."""

    def menu(self) -> PartMenu | None:
        """The ways to run it, that in which it runs now among them; None if it saves nothing for backward."""

    def way(self) -> PartWay | None:
        """The way in which it runs now."""

    def plan_of(self, way: PartWay, spare: int) -> JointMemoryPlan:
        """What it saves in a way that leaves so many bytes of the budget."""

    def run_so(self, way: PartWay, spare: int) -> None:
        """Compiles it once more before its next call, if it runs in another way."""

    def run_alone(self) -> None:
        """Plans it by itself, since its steps call nothing else."""

    def run_with_others(self) -> None:
        """Takes as little memory as it can until the whole step is known."""


def steps_of(options: Mapping[str, Any]) -> Steps:
    """The steps of the graphs that are compiled with this mapping; they live as long as one of the graphs."""
    found = _STEPS.get(id(options))
    if found is None:
        found = _STEPS[id(options)] = Steps(options)
    return found


def forget_steps() -> None:
    """Lets graphs that are compiled from now on begin anew, after a reset of Dynamo."""
    _STEPS.clear()


#: By the identity of options, which their steps keep alive.
_STEPS: weakref.WeakValueDictionary[int, Steps] = weakref.WeakValueDictionary()

#: So many kinds of steps are planned for; of more, those that have not been seen for longest are forgotten.
_MOST_KINDS = 8
#: A step of more calls is not recorded.
_MOST_CALLS = 20_000


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    """Which graphs a step calls and when their backwards run, and whether there were gradients before it."""

    #: The number of a graph for its forward, -1 - n for the backward of call n.
    events: tuple[int, ...]
    has_gradients: bool

    @property
    def parts(self) -> frozenset[int]:
        return frozenset(event for event in self.events if event >= 0)

    @property
    def calls(self) -> int:
        return sum(event >= 0 for event in self.events)

    @property
    def begin(self) -> tuple[int, bool]:
        """What is known of it when its first call begins."""
        return self.events[0], self.has_gradients


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """A step as it was recorded, and the ways in which its graphs ran."""

    step: RecordedStep
    ways: dict[int, PartWay]


@final
class Steps:
    """What the graphs of one torch.compile call do in a step, and the plan for all of them."""

    def __init__(self, options: object = None) -> None:
        self._options = options
        self._parts: list[weakref.ref[Part]] = []
        self._uncalled: set[int] = set()
        #: Least recently seen first.
        self._kinds: dict[_Kind, _Seen] = {}
        self._alone: set[int] = set()
        #: Graphs and their backwards may run in several threads.
        self._lock = RLock()
        self._running = _Running(self._lock)
        #: How steps begin that ran in another way than the known ones while they were not recorded.
        self._unrecorded: set[tuple[int, bool]] = set()
        self._plan: _Planned | None = None
        #: What no choice of ways fits. Its error is made anew for each call: one that is raised keeps what called it.
        self._refused: PlannedWays | None = None

    @property
    def plan(self) -> StepMemoryPlan | None:
        """The plan of the whole step; None as long as every step has had one call."""
        return None if self._plan is None else self._plan.shown

    def adopt(self, part: Part) -> int:
        """The number of a new graph."""
        self._parts.append(weakref.ref(part))
        self._uncalled.add(len(self._parts) - 1)
        return len(self._parts) - 1

    def expects_several(self) -> bool:
        """Whether a graph that is compiled now is one of several of its step, as far as that is known."""
        return self._plan is not None or self._running.has_pending() or any(True for _ in self.waiting())

    def waiting(self) -> Iterator[Part]:
        """The graphs that were compiled and not called yet."""
        for number in sorted(self._uncalled):
            if (part := self._parts[number]()) is not None:
                yield part

    def runs_alone(self, number: int) -> bool:
        """Whether the steps of a graph have called nothing else so far."""
        return number in self._alone

    def begins(self, number: int, arguments: Sequence[object]) -> Call:
        """A call that begins now; if it is the first of a step, the steps before it are planned."""
        with self._lock:
            if not self._running.events or self._running.is_over(number):
                finished, self._running = self._running, _Running(self._lock)
                self._finish(finished)
                self._start(number, arguments)
            if self._refused is not None:
                raise infeasible(self._refused)
            self._uncalled.discard(number)
            part = self._parts[number]()
            return self._running.begins(number, arguments, None if part is None else part.model())

    def _start(self, number: int, arguments: Sequence[object]) -> None:
        """Begins a step; it is recorded if it may be of a new kind."""
        part = self._parts[number]()
        assert part is not None
        self._running.has_gradients = any(map(_has_gradient, arguments))
        device = part.device
        begin = number, self._running.has_gradients
        if begin in self._unrecorded or all(kind.begin != begin for kind in self._kinds):
            allocated = 0
            if device is not None:
                # Workspaces of libraries are part of what is predicted, and allocated from the first step on.
                allocated = torch.cuda.memory_allocated(device) - (part.fixed_bytes if self._kinds else 0)
            self._running.recorder = StepRecorder(device, allocated, to_come=part.bytes_to_come())
        if device is not None and self._plan is not None and self._plan.finished_steps == 1:
            # Compilation may have raised the peak.
            torch.cuda.reset_peak_memory_stats(device)

    def _finish(self, ran: _Running) -> None:
        if not ran.has_backward or ran.calls > _MOST_CALLS:
            return
        kind = ran.kind()
        if kind in self._kinds:
            self._kinds[kind] = self._kinds.pop(kind)
            self._measure(kind)
            return
        if ran.recorder is None:
            self._unrecorded.add(kind.begin)
            return
        self._unrecorded.discard(kind.begin)
        alive = {number: part for number in kind.parts if (part := self._parts[number]()) is not None}
        if len(alive) < len(kind.parts):
            return
        ways = {number: way for number, part in alive.items() if (way := part.way()) is not None}
        self._kinds[kind] = _Seen(ran.recorder.finished(), ways)
        while len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if kind.calls == 1 and not any(kind.parts & one.parts for one in self._together()):
            self._alone |= kind.parts
            for part in alive.values():
                part.run_alone()
            return
        if self._plan is not None and self._holds(self._plan, kind):
            return
        try:
            self._plan_together(0 if self._plan is None else self._plan.margin)
        except BaseException:
            # It was not planned for, so the next one like it must be.
            del self._kinds[kind]
            raise

    def _holds(self, planned: _Planned, kind: _Kind) -> bool:
        """Whether a new kind of step fits as its graphs are planned, so that nothing is compiled once more for it."""
        parts = {number: part for number in kind.parts if (part := self._parts[number]()) is not None}
        return holds(
            planned.found,
            self._kinds[kind].step,
            {number: menu for number, part in parts.items() if (menu := part.menu()) is not None},
            self._kinds[kind].ways,
            beside=next(iter(parts.values())).communication_bytes + planned.margin,
        )

    def _together(self) -> list[_Kind]:
        """The kinds of steps with several calls whose graphs are still there, and those that share a graph with one."""
        alive = [kind for kind in self._kinds if all(self._parts[number]() is not None for number in kind.parts)]
        several = [kind for kind in alive if kind.calls > 1]
        parts = frozenset[int]().union(*(kind.parts for kind in several))
        return [kind for kind in alive if kind.calls > 1 or kind.parts & parts]

    def _plan_together(self, margin: int) -> None:
        """Plans all graphs; those that run in another way then are compiled once more when they are called."""
        kinds = self._together()
        parts = {number: part for kind in kinds for number in kind.parts if (part := self._parts[number]()) is not None}
        first = next(iter(parts.values()))
        found = plan_steps(
            [self._kinds[kind].step for kind in kinds],
            {number: menu for number, part in parts.items() if (menu := part.menu()) is not None},
            [self._kinds[kind].ways for kind in kinds],
            budget=first.budget,
            beside=first.communication_bytes + margin,
            names={number: part.name for number, part in parts.items()},
        )
        if first.device is not None:
            check_device_has(found.asked, first.device)
        if not found.fits:
            if self._plan is None:
                self._refused = found
                return
            log.warning("no plan holds the budget of the step: %s", infeasible(found))
        self._alone -= set(parts)
        changed = [
            part.name for number, part in parts.items() if number in found.ways and part.way() != found.ways[number]
        ]
        shown = self._shown(found, kinds, parts)
        log.info("%s", shown)
        if changed:
            log.info("the step was planned as a whole; compiled once more: %s", ", ".join(changed))
        self._plan = _Planned(shown, found, margin)
        for number, way in found.ways.items():
            parts[number].run_so(way, found.spare[number])
        if first.on_plan is not None:
            first.on_plan(shown)

    def _shown(self, found: PlannedWays, kinds: Sequence[_Kind], parts: Mapping[int, Part]) -> StepMemoryPlan:
        """The plan for users, with the moments of the kind of step with the highest peak."""
        at = max(range(len(kinds)), key=lambda at: max(found.bytes[at]))
        step = self._kinds[kinds[at]].step
        order = [number for number in sorted(parts) if number in found.ways]
        calls = [call.part for call in step.calls]
        return StepMemoryPlan(
            tuple(
                StepPart(
                    parts[number].name,
                    calls.count(number),
                    found.ways[number].held,
                    found.ways[number].seconds,
                    parts[number].plan_of(found.ways[number], found.spare[number]),
                )
                for number in order
            ),
            found.peak,
            found.asked,
            found.plain_peak,
            found.smallest_peak,
            sum(found.ways[number].seconds for number in calls if number in found.ways),
            tuple(
                StepMoment("forward" if is_forward else "backward", parts[step.calls[call].part].name, size)
                for (call, is_forward), size in zip(step.moments, found.bytes[at], strict=True)
            ),
            found.occupants,
        )

    def _measure(self, kind: _Kind) -> None:
        """Compares the peak of the second step after a plan, in which nothing is compiled any more."""
        if self._plan is None or kind not in self._together():
            return
        self._plan.finished_steps += 1
        devices = [part.device for number in kind.parts if (part := self._parts[number]()) is not None]
        if self._plan.finished_steps == 2 and devices and devices[0] is not None:
            self.compare(torch.cuda.max_memory_allocated(devices[0]))

    def compare(self, measured: int) -> None:
        """Plans all graphs once more if the measured peak of a step is over the budget.

        What it took more than predicted counts then. Where no plan fits, it is the one with the smallest peak.
        """
        planned = self._plan
        assert planned is not None
        found = planned.found
        shown = [shown_bytes(number) for number in (measured, found.peak, found.asked)]
        log.info("the step takes %s at its peak, predicted %s, allowed %s", *shown)
        if measured <= found.asked or planned.margin:
            return
        log.warning("the step is over its budget by %s; it is planned once more", shown_bytes(measured - found.asked))
        self._plan_together(max(measured - found.peak, 0))


@final
@dataclass(slots=True)
class _Planned:
    shown: StepMemoryPlan
    found: PlannedWays
    #: By how much a step was measured to be over its prediction.
    margin: int
    #: The steps that have run since, in the first of which graphs may have been compiled.
    finished_steps: int = 0


@final
class _Running:
    """The step that runs now: its calls, and those whose backward is still to run."""

    def __init__(self, lock: RLock) -> None:
        #: Held while one thread notes what runs.
        self.lock = lock
        self.events: list[int] = []
        self.calls = 0
        self.has_backward = False
        self.has_gradients = False
        self.recorder: StepRecorder | None = None
        self._pending: dict[int, weakref.ref[Call]] = {}

    def kind(self) -> _Kind:
        return _Kind(tuple(self.events), self.has_gradients)

    def has_pending(self) -> bool:
        return bool(self._pending)

    def is_over(self, number: int) -> bool:
        """Whether a call of this graph begins another step.

        It does if no backward is left to run. Some may never run, if their results are not used for the loss: then a
        step ends where the graph that began it is called again after a backward.
        """
        return not self._pending or (self.events[0] == number and self.events[-1] < 0)

    def begins(self, number: int, arguments: Sequence[object], model: nn.Module | None) -> Call:
        call = Call(self, self.calls)
        self.calls += 1
        if self.calls > _MOST_CALLS:
            self.recorder = None
            return call
        self.events.append(number)
        if self.recorder is not None:
            self.recorder.forward_begins(number, arguments, model)
        return call

    def waits_for(self, call: Call) -> None:
        """A backward of this call may run, until its autograd graph is freed."""
        pending, recorder, number = self._pending, weakref.ref(self), call.number

        def freed(_: object) -> None:
            pending.pop(number, None)
            running = recorder()
            if running is not None and running.recorder is not None:
                running.recorder.freed(number)

        pending[number] = weakref.ref(call, freed)

    def ran_backward(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self.events.append(-1 - number)
            self.has_backward = True


@final
class Call:
    """One call of a graph; the hooks of its backward keep it alive as long as its autograd graph."""

    __slots__ = ("__weakref__", "_running", "_since", "number")

    def __init__(self, running: _Running, number: int) -> None:
        self._running = weakref.ref(running)
        self.number = number
        self._since = next_function_number()

    def ended(self, results: Sequence[object]) -> None:
        """Its forward has run."""
        running = self._running()
        if running is None:
            return
        with running.lock:
            if running.recorder is not None:
                running.recorder.forward_ended(self.number, results)
            function = backward_of(results, self._since)
            if function is not None:
                running.waits_for(self)
                watch_backward(
                    function, self._backward_begins if running.recorder is not None else None, self._backward_ended
                )

    def _backward_begins(self) -> None:
        running = self._running()
        if running is not None:
            with running.lock:
                if running.recorder is not None:
                    running.recorder.backward_begins(self.number)

    def _backward_ended(self) -> None:
        running = self._running()
        if running is not None:
            with running.lock:
                running.ran_backward(self.number)


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf and value.grad is not None
