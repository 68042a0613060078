"""The timeline of a training step: the bytes that are allocated after every operator, and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    #: The segment, or the first and the last one.
    segment: str
    node: str
    path: str
    operator: str

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f" in {self.path}" if self.path else ""
        what = self.node or self.operator or "an input"
        return f"{shown_bytes(self.bytes)}{times}: {what}{where}, {self.segment}"


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
        return self.peak.bytes


def timeline_of(chain: Chain, ways: Sequence[Way], *, extra_bytes: int = 0) -> Timeline:
    """The timeline of the step in which each segment runs in the given way."""
    base = chain.resident_bytes + extra_bytes
    starts = list(accumulate((way.trial.held for way in ways), initial=base))
    around = list(zip(chain.links, ways, starts, strict=False))
    forward = [moment for link, way, start in around for moment in _forward(link, way, start)]
    backward = [moment for link, way, start in reversed(around) for moment in _backward(link, way, start)]
    moments = (*forward, *backward)
    peak = max(range(len(moments)), key=lambda at: moments[at].bytes)
    at = next(place for place, link in enumerate(chain.links) if link.region.name == moments[peak].segment)
    trial = ways[at].trial
    local = trial.forward_allocations if peak < len(forward) else trial.backward_allocations
    gradients = 0 if peak < len(forward) else chain.links[at].before_backward
    allocated = [
        (link, one) for link, way in zip(chain.links[:at], ways, strict=False) for one in way.trial.held_allocations
    ]
    allocated += [(chain.links[at], one) for one in local]
    return Timeline(moments, base, gradients, tuple(_occupants(allocated)))


def _forward(link: Link, way: Way, start: int) -> Iterator[Moment]:
    for ran in way.trial.ran[: way.trial.backward_at]:
        yield _moment("forward", link, ran, start)


def _backward(link: Link, way: Way, start: int) -> Iterator[Moment]:
    start += link.before_backward
    for ran in way.trial.ran[way.trial.backward_at :]:
        phase = "recompute" if ran.phase == "recompute" else "backward"
        yield _moment(phase, link, ran, start)


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
