"""Which values of a joint graph to save for backward, so that the compiled step is fastest and its peak fits."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import inf
from typing import Any, final

from torch import Tensor
from torch.fx import Node

from partita._html import html_facts
from partita.analysis.nodes import value_of
from partita.errors import BudgetError
from partita.memory.budget import shown_bytes
from partita.memory.joint.model import JointModel
from partita.memory.joint.simulation import Simulated, simulate
from partita.memory.picture import Picture
from partita.memory.rates import Rates, shown_milliseconds
from partita.memory.timeline import Moment, Occupant, Timeline
from partita.memory.trials import module_path
from partita.policies.repeats import Repeats
from partita.program.program import Program
from partita.regions.joint_forward import forward_part
from partita.solvers.ladder import Ladder
from partita.solvers.peak import Choice, Stage, fastest, frontier, ladder_of, least_peak


@final
@dataclass(frozen=True, slots=True)
class JointStep:
    """How a joint graph is run: by a compiler that fuses or not, on a device of these rates."""

    rates: Rates
    #: Whether the compiler fuses pointwise operators.
    fuses: bool = True
    #: Memory of libraries that is in no graph, such as cuBLAS workspaces.
    fixed_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class KeptInSegment:
    """What one segment of the forward saves for backward."""

    segment: int
    nodes: tuple[str, ...]
    bytes: int
    #: The seconds that its backward takes to recompute what it does not save.
    seconds: float


@final
@dataclass(frozen=True)
class JointMemoryPlan:
    """The values of a joint graph to save, the peak that follows, and what it costs; it prints as a few lines."""

    #: The values of the forward that are saved for backward, in graph order.
    saved: tuple[Node, ...] = field(repr=False)
    segments: tuple[KeptInSegment, ...]
    #: The peak in bytes, beside what is allocated throughout, and what was allowed.
    peak_bytes: int
    allowed_bytes: int
    #: The peak of the fastest step, which recomputes only what is as quick to compute as to read.
    plain_peak_bytes: int
    #: The seconds of all that is recomputed.
    seconds: float
    simulated: Simulated = field(repr=False)
    #: The same for the fastest step.
    plain_simulated: Simulated | None = field(default=None, repr=False)
    #: What is allocated throughout, as far as it is known: parameters, buffers, arguments, communication.
    resident_bytes: int = 0
    #: For each segment the number of what it saves in the planner's list.
    chosen: tuple[int, ...] = field(default=(), repr=False)

    @property
    def timeline(self) -> Timeline:
        """The bytes after every operator that allocates, beside what is allocated throughout."""
        return _timeline(self.simulated)

    @property
    def plain_timeline(self) -> Timeline:
        """The same for the fastest step."""
        return _timeline(self.plain_simulated or self.simulated)

    def picture(self) -> Picture:
        """The bytes over the step, as planned and of the fastest step, with what is allowed; prints as a chart."""
        title = "beside what is allocated throughout"
        return Picture(self.timeline, self.plain_timeline, self.allowed_bytes, title, plain_name="fastest step")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return html_facts({}, notes=list(self._lines())) + self.picture().svg()

    def _lines(self) -> Iterator[str]:
        for _, group in groupby(self.segments, key=lambda one: (len(one.nodes), one.bytes)):
            members = list(group)
            first, last = members[0].segment, members[-1].segment
            name = f"segment {first}" if first == last else f"segments {first} to {last}"
            kept = ", ".join(members[0].nodes[:4]) + (" ..." if len(members[0].nodes) > 4 else "")
            yield (
                f"{name}: {shown_bytes(sum(one.bytes for one in members))} by choice ({kept or 'nothing'}), "
                f"{shown_milliseconds(sum(one.seconds for one in members))} to recompute the rest"
            )
        at = self.simulated.at
        half = "forward" if self.simulated.forward_peak > self.simulated.backward_peak else "backward"
        yield (
            f"peak {shown_bytes(self.peak_bytes)} of {shown_bytes(self.allowed_bytes)} allowed beside what is "
            f"allocated throughout; of the fastest step {shown_bytes(self.plain_peak_bytes)}"
        )
        if self.resident_bytes:
            peak, allowed = self.peak_bytes + self.resident_bytes, self.allowed_bytes + self.resident_bytes
            yield (
                f"  allocated throughout: {shown_bytes(self.resident_bytes)}, so in all {shown_bytes(peak)} of "
                f"{shown_bytes(allowed)}"
            )
        yield f"  when: {half}, {at.name if at is not None else '?'}{_in_module(at)}"
        occupants = sorted(self.simulated.occupants.items(), key=lambda pair: (-pair[1], pair[0].name))
        for node, size in occupants[:6]:
            yield f"  {shown_bytes(size)}: {node.name}{_in_module(node)}"
        yield f"recomputation takes {shown_milliseconds(self.seconds)}"


def _in_module(node: Node | None) -> str:
    path = "" if node is None else module_path(node)
    return f" in {path}" if path else ""


#: The most candidates in a segment, of which all sets are tried.
_MOST_CANDIDATES = 10
#: Into so many parts the bytes from the smallest to the plain peak are divided by the plans that are known at first.
_PARTS = 8


@final
class JointPlanner:
    """Plans for one joint graph: for any number of bytes the fastest choice of saved values.

    Of `never_save` only results of random operators are saved, and what `must_save` has.
    """

    def __init__(
        self,
        program: Program,
        step: JointStep,
        *,
        must_save: Collection[Node] = (),
        never_save: Collection[Node] = (),
    ) -> None:
        joint = program.joint
        assert joint is not None
        segment = segments_of_forward(program)
        nodes = program.index.nodes
        self.model = model = JointModel(
            nodes, joint, segment, rates=step.rates, fuses=step.fuses, fixed_bytes=step.fixed_bytes
        )
        self.count = model.last_segment + 1
        self.never = model.constants | frozenset(never_save)
        self.always = self._always(must_save)
        self.needed: dict[int, list[Node]] = {}
        for node in model.read_by_backward:
            self.needed.setdefault(segment[node], []).append(node)
        self.nodes: list[list[Node]] = [[] for _ in range(self.count)]
        for node in model.forward:
            self.nodes[segment[node]].append(node)
        self._read_by_backward = {model.base[node] for node in model.read_by_backward}
        self._first_reader: dict[Node, int] = {}
        for node in model.forward:
            later = [segment[reader] for reader in model.readers[node] if segment.get(reader, 0) > segment[node]]
            if later:
                self._first_reader[node] = min(later)
        self.candidates = [self._candidates(at) for at in range(self.count)]
        known: dict[Hashable, list[_Entry]] = {}
        self.menus: list[list[_Entry]] = []
        for at in range(self.count):
            key = self._signature(at)
            if key not in known:
                known[key] = self._menu(at)
            self.menus.append(known[key])
        self._simulations: dict[tuple[int, ...], Simulated] = {}
        self._plain = tuple(len(menu) - 1 for menu in self.menus)
        self.plain = self._simulated(self._plain)

    def _always(self, must_save: Collection[Node]) -> frozenset[Node]:
        """Saved in every plan: borders of segments, small results, what random operators give, what the caller says.

        Constants and what is never saved are none of them, unless the caller says so.
        """
        model = self.model
        found = set(model.borders - self.never)
        for node in model.forward:
            value = value_of(node)
            if not isinstance(value, Tensor) or (node in model.views and not model.is_item(node)):
                continue
            maker = node.args[0] if model.is_item(node) else node
            is_read = node not in self.never and any(user not in model.small for user in node.users)
            if (node in model.small and is_read) or maker in model.random or node in must_save:
                found.add(node)
        return frozenset(found)

    def _candidates(self, at: int) -> list[Node]:
        """What a segment may save: results of kernels of their own, and values that several operators read."""
        return [node for node in self.nodes[at] if self._is_worth_saving(node)]

    def _is_worth_saving(self, node: Node) -> bool:
        model, value = self.model, value_of(node)
        if node in self.always or node in self.never or node in model.small or not isinstance(value, Tensor):
            return False
        if (node in model.views and not model.is_item(node)) or node in model.containers:
            return False
        if node in model.heavy or (model.is_item(node) and node.args[0] in model.heavy):
            return True
        return model.is_materialized(node, ()) or model.is_shared(node)

    def _signature(self, at: int) -> Hashable:
        """Equal for segments whose menus are equal: their operators with shapes, and which are candidates."""
        nodes = self.nodes[at]
        local = {node: place for place, node in enumerate(nodes)}
        wanted = set(self.candidates[at])
        rows = tuple(
            (
                str(node.target),
                _shape(node),
                tuple(local.get(read, -1 - self._crossing_bytes(read, at)) for read in node.all_input_nodes),
                node in wanted,
                node in self.always,
            )
            for node in nodes
        )
        return rows, tuple(local[node] for node in self.needed.get(at, ()))

    def _menu(self, at: int) -> list[_Entry]:
        """The undominated sets of candidates, fewest bytes first; of many candidates not all sets are tried."""
        count = len(self.candidates[at])
        if count <= _MOST_CANDIDATES:
            sets = [tuple(place for place in range(count) if bits >> place & 1) for bits in range(1 << count)]
            entries = [self._entry(at, places) for places in sets]
        else:
            entries = list(self._shrinking(at))
        kept: list[_Entry] = []
        for entry in sorted(entries, key=lambda entry: (entry.held, entry.seconds, len(entry.places), entry.places)):
            if entry.seconds < (kept[-1].seconds if kept else inf) - 1e-9:
                kept.append(entry)
        return kept

    def _entry(self, at: int, places: tuple[int, ...]) -> _Entry:
        model = self.model
        chosen = {self.candidates[at][place] for place in places}
        saved, needed = self.always | chosen, self.needed.get(at, ())
        recomputed = model.recomputed(saved, needed)
        # What nothing is computed from takes no memory.
        read = {one for node in recomputed for one in node.all_input_nodes} | set(needed)
        size = sum(model.size[node] for node in chosen if node in read or model.readers[node] & recomputed)
        bases = {model.base[node] for node in read if node in saved} - model.inputs
        held = sum(model.size[base] if model.segment[base] == at else self._crossing_bytes(base, at) for base in bases)
        return _Entry(size, held, sum(map(model.seconds, recomputed)), places)

    def _crossing_bytes(self, node: Node, at: int) -> int:
        """The bytes of a value of an earlier segment that is held only because a segment is recomputed from it.

        It counts for the first segment that reads it.
        """
        model, base = self.model, self.model.base.get(node, node)
        is_held_anyway = base not in self.always or base in self._read_by_backward
        return 0 if is_held_anyway or self._first_reader.get(base) != at else model.size[base]

    def _shrinking(self, at: int) -> Iterator[_Entry]:
        """Sets from all candidates to none; each excludes what costs least time for its bytes."""
        entry = self._entry(at, tuple(range(len(self.candidates[at]))))
        yield entry
        while entry.places:
            smaller = [self._entry(at, tuple(one for one in entry.places if one != place)) for place in entry.places]
            current = entry

            def price(one: _Entry, current: _Entry = current) -> tuple[float, int, tuple[int, ...]]:
                saved = current.held - one.held
                return (one.seconds - current.seconds) / saved if saved > 0 else inf, -saved, one.places

            entry = min(smaller, key=price)
            yield from smaller

    def saved(self, chosen: Sequence[int]) -> set[Node]:
        """The values that a plan saves, those among them that its backward does not need."""
        saved = set(self.always)
        for at, number in enumerate(chosen):
            saved.update(self.candidates[at][place] for place in self.menus[at][number].places)
        return saved

    @cached_property
    def stages(self) -> list[Stage]:
        """The segments as numbers: needs of each entry, from simulations in which all segments choose alike."""
        choices: list[list[Choice]] = [[] for _ in self.menus]
        for number, chosen in enumerate(self._alike()):
            simulated = self._simulated(chosen)
            before = 0
            for at, menu in enumerate(self.menus):
                entry = menu[chosen[at]]
                if number < len(menu):
                    forward = simulated.forward_by_segment.get(at, before) - before
                    backward = simulated.backward_by_segment.get(at, before) - before
                    choices[at].append(Choice(entry.seconds, entry.held, forward, backward))
                before += entry.held
        return [Stage(tuple(one)) for one in choices]

    def _alike(self) -> list[tuple[int, ...]]:
        """The plans in which all segments choose alike."""
        longest = max(map(len, self.menus))
        return [tuple(min(number, len(menu) - 1) for menu in self.menus) for number in range(longest)]

    def _simulated(self, chosen: tuple[int, ...]) -> Simulated:
        if chosen not in self._simulations:
            self._simulations[chosen] = simulate(self.model, self.saved(chosen))
        return self._simulations[chosen]

    @cached_property
    def _known(self) -> list[tuple[int, ...]]:
        """Plans of all sizes, among them those that take least."""
        least, _ = self._least
        most = max(self.plain.peak, least)
        asked = (least + (most - least) * part // _PARTS for part in range(1, _PARTS))
        spread = [one for bytes_ in asked if (one := fastest(self.stages, bytes_)) is not None]
        return list(dict.fromkeys((*self._small, *spread)))

    @cached_property
    def _small(self) -> list[tuple[int, ...]]:
        """Plans among which is the one that takes least: by what is known of segments, and those that choose alike."""
        least, chosen = self._least
        return list(dict.fromkeys((*self._alike(), chosen, fastest(self.stages, least) or chosen)))

    @cached_property
    def _least(self) -> tuple[int, tuple[int, ...]]:
        """The smallest peak, and its plan, by what is known of segments."""
        return least_peak(self.stages)

    @cached_property
    def _smallest(self) -> tuple[int, ...]:
        """The plan with the smallest peak, the fastest of these."""
        return min(self._small, key=lambda chosen: (self.peak_of(chosen), self.seconds(chosen)))

    def has(self, chosen: Sequence[int]) -> bool:
        """Whether each segment has such a choice."""
        return len(chosen) == len(self.menus) and all(
            number < len(menu) for menu, number in zip(self.menus, chosen, strict=True)
        )

    def peak_of(self, chosen: tuple[int, ...]) -> int:
        """The peak of a plan, beside what is allocated throughout."""
        return self._simulated(chosen).peak

    def alternatives(self, most: int) -> list[tuple[int, ...]]:
        """About so many plans that differ in what they hold, in their peaks and in their time."""
        known = list(self._known)
        least = min(self._simulated(chosen).peak for chosen in known)
        highest = max(self.plain.peak, least)
        for room in (highest, (least + highest) // 2, least):
            ends = frontier(self.stages, room)
            count = max((most - len(known)) // 3, 2)
            known += [ends[round(at * (len(ends) - 1) / (count - 1))] for at in range(count)] if ends else []
        return list(dict.fromkeys(known))

    @cached_property
    def smallest_peak(self) -> int:
        """The smallest peak of any plan, beside what is allocated throughout."""
        return self.peak_of(self._smallest)

    def plan(self, room: int, *, margin: int = 0, resident: int = 0) -> JointMemoryPlan:
        """The fastest choice of saved values whose peak is at most `room` bytes.

        `room` is what is left beside `resident`, all that is allocated throughout. `margin` is by how much an earlier
        plan was measured to be over its prediction. Raises a `BudgetError` with the smallest peak, `resident` included.
        """
        allowed = room - margin
        best = self._fastest_that_fits(allowed)
        if best is None:
            raise self._infeasible(room, margin, resident)
        return self.planned(best, room, margin=margin, resident=resident)

    def _fastest_that_fits(self, allowed: int) -> tuple[int, ...] | None:
        """A plan that takes about `allowed` bytes and not more; None if the smallest takes more."""
        if self.plain.peak <= allowed:
            return self._plain
        if self.peak_of(self._smallest) > allowed:
            return None
        return self._ladder.at(allowed)

    @cached_property
    def _ladder(self) -> Ladder:
        """The plans between the smallest peak and that of the fastest step."""
        return ladder_of(self.stages, self.peak_of, slow=self._smallest, fast=self._plain)

    def seconds(self, chosen: Sequence[int]) -> float:
        """The time that a plan takes to recompute what it does not save."""
        return sum(menu[number].seconds for menu, number in zip(self.menus, chosen, strict=True))

    def _infeasible(self, room: int, margin: int, resident: int) -> BudgetError:
        smallest = self._simulated(self._smallest)
        total = smallest.peak + margin + resident
        largest = sorted(smallest.occupants.items(), key=lambda pair: (-pair[1], pair[0].name))[:3]
        return BudgetError(
            f"no choice of saved values takes at most {shown_bytes(room + resident)}; the smallest peak is "
            f"{shown_bytes(total)} ({total} bytes): {shown_bytes(resident)} that are allocated throughout, and "
            + ", ".join(f"{shown_bytes(size)} of {node.name}{_in_module(node)}" for node, size in largest)
            + " are most of the rest. Allow that much, or use smaller batches",
            smallest=total,
        )

    def planned(self, chosen: tuple[int, ...], room: int, *, margin: int = 0, resident: int = 0) -> JointMemoryPlan:
        """The plan with these choices, whatever its peak is."""
        model, simulated = self.model, self._simulated(chosen)
        reached = model.reached(self.saved(chosen))
        segments = []
        for at, number in enumerate(chosen):
            entry = self.menus[at][number]
            names = tuple(self.candidates[at][place].name for place in entry.places)
            segments.append(KeptInSegment(at, names, entry.bytes, entry.seconds))
        return JointMemoryPlan(
            tuple(sorted(reached, key=model.place.__getitem__)),
            tuple(segments),
            simulated.peak + margin,
            room,
            self.plain.peak + margin,
            sum(one.seconds for one in segments),
            simulated,
            self.plain,
            resident,
            chosen,
        )


@final
@dataclass(frozen=True, slots=True)
class _Entry:
    """One set of candidates of a segment, by place, its bytes, and the seconds to recompute the rest."""

    bytes: int
    #: All that is held between forward and backward because of this set, what is always saved among it.
    held: int
    seconds: float
    places: tuple[int, ...]


def _shape(node: Node) -> Hashable:
    value = value_of(node)
    values: Iterable[Any] = value if isinstance(value, tuple | list) else (value,)
    return tuple((str(one.dtype), tuple(map(str, one.shape))) if isinstance(one, Tensor) else None for one in values)


def segments_of_forward(program: Program) -> dict[Node, int]:
    """For each node of the forward of a joint graph the number of its segment, in order: what repeats, and the rest."""
    part = forward_part(program)
    # Each layer reads a seed of its own, which makes no difference to memory.
    for node in part.program.graph.nodes:
        if "inductor_lookup_seed" in str(node.target):
            node.args = (node.args[0], 0)
    partition = Repeats(min_size=_FEWEST_OPERATORS, min_saved=_LEAST_SAVED)(part.program)
    order = [vertex for vertex in partition.order if vertex < len(partition)]
    number = {part.original[node]: at for at, vertex in enumerate(order) for node in partition.regions[vertex].nodes}
    joint = program.joint
    found: dict[Node, int] = {}
    last = 0
    for node in () if joint is None else joint.forward:
        made_in = [found[read] for read in node.all_input_nodes if read in found]
        last = number.get(node, max([last, *made_in]))
        found[node] = last
    return found


#: A repeat has so many operators, and covers so much of the forward.
_FEWEST_OPERATORS, _LEAST_SAVED = 6, 0.05


def _timeline(simulated: Simulated) -> Timeline:
    """The bytes after every operator that allocates, beside what is allocated throughout."""
    moments = tuple(
        Moment(phase, f"segment {segment}", str(node.target), node.name, module_path(node), size)
        for (node, size), (phase, segment) in zip(simulated.series, simulated.phases, strict=True)
    )
    return Timeline(moments, 0, 0, tuple(_occupants(simulated.occupants)))


def _occupants(sizes: dict[Node, int]) -> list[Occupant]:
    """What is allocated at the peak, largest first; results of equal operators and sizes are counted together."""
    groups: dict[tuple[int, str], list[Node]] = {}
    for node in sorted(sizes, key=lambda node: node.name):
        groups.setdefault((sizes[node], str(node.target)), []).append(node)
    found = [
        Occupant(size * len(nodes), len(nodes), _between(nodes), nodes[0].name, module_path(nodes[0]), operator)
        for (size, operator), nodes in groups.items()
    ]
    return sorted(found, key=lambda one: -one.bytes)


def _between(nodes: list[Node]) -> str:
    return "" if len(nodes) == 1 else f"{nodes[0].name} to {nodes[-1].name}"
