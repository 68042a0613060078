"""The timeline of a training step: the bytes that are allocated after every operator, and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

from partita.memory._torch.recorder import Allocation, Ran
from partita.memory.budget import shown_bytes
from partita.memory.chain import Chain, Link, Way
from partita.memory.trials import module_path


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """One operator of the step: in which half and segment it runs, and the bytes allocated when it has returned."""

    #: "forward", "recompute" or "backward".
    phase: str
    segment: str
    operator: str
    #: The node that it belongs to; in the backward, the node whose gradient it computes.
    node: str
    path: str
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class Occupant:
    """Memory that is allocated at the peak, of one kind; equal ones of several segments are counted together."""

    bytes: int
    count: int
    #: The segment, or the first and the last one; in compiled steps the first and the last node.
    segment: str
    node: str
    path: str
    operator: str

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f" in {self.path}" if self.path else ""
        what = self.node or self.operator or "an input"
        segment = f", {self.segment}" if self.segment else ""
        return f"{shown_bytes(self.bytes)}{times}: {what}{where}{segment}"


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """Every operator of a step with the bytes allocated after it, and what is allocated at the peak."""

    moments: tuple[Moment, ...]
    #: Parameters, buffers, arguments and what else is allocated throughout; part of all bytes above.
    resident_bytes: int
    #: Gradients that are complete at the peak, and results that the caller keeps.
    gradient_bytes: int
    occupants: tuple[Occupant, ...]

    @property
    def peak(self) -> Moment:
        """The first moment at which most is allocated."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peak_bytes(self) -> int:
        """The bytes that are allocated then."""
        return max((moment.bytes for moment in self.moments), default=self.resident_bytes)

    def rows(self) -> list[dict[str, str | int]]:
        """A row of plain values for each operator, as data frames and JSON take them."""
        return [asdict(moment) for moment in self.moments]


def timeline_of(chain: Chain, ways: Sequence[Way], *, extra_bytes: int = 0) -> Timeline:
    """The timeline of the step in which each segment runs in the given way."""
    base = chain.resident_bytes + extra_bytes
    runs = list(_runs(chain, ways, base))
    forward = [(at, moment) for at, run in enumerate(runs) for moment in run.forward()]
    backward = [(at, moment) for at, run in reversed(list(enumerate(runs))) for moment in run.backward()]
    moments = [*forward, *backward]
    peak = max(range(len(moments)), key=lambda number: moments[number][1].bytes)
    at = moments[peak][0]
    trial, is_forward = runs[at].way.trial, peak < len(forward)
    local = trial.forward_allocations if is_forward else trial.backward_allocations
    gradients = 0 if is_forward else chain.links[at].before_backward
    allocated = [*_held_before(runs, at, local, is_forward=is_forward), *((chain.links[at], one) for one in local)]
    return Timeline(tuple(moment for _, moment in moments), base, gradients, tuple(_occupants(allocated)))


@final
@dataclass(frozen=True, slots=True)
class _Run:
    """One segment in a step: what is allocated before its forward, and which shared values are saved by then."""

    link: Link
    way: Way
    start: int
    saved: frozenset[int]

    def forward(self) -> Iterator[Moment]:
        kept = self._kept()
        for number, ran in enumerate(self.way.trial.ran[: self.way.trial.backward_at]):
            yield _moment("forward", self.link, ran, self.start + _freed_by(kept, number))

    def backward(self) -> Iterator[Moment]:
        kept, first = self._kept(), self.way.trial.backward_at
        start = self.start + self.link.before_backward - self.link.stage().passed(self.saved)
        for number, ran in enumerate(self.way.trial.ran[first:], first):
            phase = "recompute" if ran.phase == "recompute" else "backward"
            yield _moment(phase, self.link, ran, start + _freed_by(kept, number))

    def _kept(self) -> list[Allocation]:
        """Inputs that stay allocated since an earlier segment has saved them."""
        inputs = zip(self.link.shared.inputs, self.way.trial.input_allocations, strict=True)
        return [one for value, allocations in inputs if value in self.saved for one in allocations]


def _runs(chain: Chain, ways: Sequence[Way], base: int) -> Iterator[_Run]:
    start, saved = base, frozenset[int]()
    for link, way in zip(chain.links, ways, strict=True):
        yield _Run(link, way, start, saved)
        held, _, saved = link.stage().run(link.choice(way), saved)
        start += held


def _freed_by(allocations: Sequence[Allocation], number: int) -> int:
    return sum(one.bytes for one in allocations if one.died is not None and one.died <= number)


def _held_before(
    runs: Sequence[_Run], at: int, local: Sequence[Allocation], *, is_forward: bool
) -> list[tuple[Link, Allocation]]:
    """What segments before `at` have left allocated while its forward or backward runs; `local` is what it has."""
    now = runs[at]
    inputs = list(zip(now.link.shared.inputs, now.way.trial.input_allocations, strict=True))
    alive = {value for value, allocations in inputs if any(one is here for one in allocations for here in local)}
    if is_forward:
        alive |= {value for value, _ in now.link.shared.passing}
    for run in runs[:at]:
        alive |= run.link.shared.saved_by(run.way.trial)
    held = []
    for run in runs[:at]:
        made = zip(run.link.shared.outputs, run.way.trial.output_allocations, strict=True)
        freed = [one for value, one in made if value is not None and value not in alive]
        kept = (one for one in run.way.trial.held_allocations if not any(one is gone for gone in freed))
        held += [(run.link, one) for one in kept]
    return held


def _moment(phase: str, link: Link, ran: Ran, start: int) -> Moment:
    return Moment(phase, link.region.name, ran.operator, *_named(link, ran.node, ran.path), start + ran.allocated)


def _named(link: Link, name: str, path: str) -> tuple[str, str]:
    """The name and module path of a node of this segment, by its name in the first equal one."""
    node = link.node_named(name)
    return (name, path) if node is None else (node.name, module_path(node))


def _occupants(allocated: Iterable[tuple[Link, Allocation]]) -> list[Occupant]:
    """The allocations, largest first; those of equal size by equal operators are counted together."""
    groups: dict[tuple[int, str], list[tuple[Link, Allocation]]] = {}
    for link, one in allocated:
        if one.operator:  # Others are inputs, which the segment that makes them counts.
            groups.setdefault((one.bytes, one.operator), []).append((link, one))
    found = []
    for group in groups.values():
        names = list(dict.fromkeys(link.region.name for link, _ in group))
        segment = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        link, first = group[0]
        total = sum(one.bytes for _, one in group)
        found.append(Occupant(total, len(group), segment, *_named(link, first.node, first.path), first.operator))
    return sorted(found, key=lambda one: -one.bytes)
