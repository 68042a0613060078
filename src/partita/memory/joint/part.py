"""The ways to run a graph that is a part of a training step: what each holds, needs and takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.memory.joint.plan import JointPlanner
from partita.memory.joint.simulation import simulate_part
from partita.program.joint import Joint


@final
@dataclass(frozen=True, slots=True)
class PartWay:
    """One way to run a part; all bytes are those beside its inputs and the gradients of its results."""

    #: For each segment the number of what it saves in the planner's list.
    chosen: tuple[int, ...]
    #: The time to recompute what is not saved.
    seconds: float
    #: Held between forward and backward, without inputs and results.
    held: int
    #: The most that is allocated while its forward runs, and while its backward runs.
    forward: int
    backward: int
    #: The inputs and the results that its backward reads, by number.
    inputs: frozenset[int]
    results: frozenset[int]


@final
@dataclass(frozen=True, slots=True)
class PartMenu:
    """The ways of one graph that are worth considering; the first one holds least, the last one is the fastest."""

    ways: tuple[PartWay, ...]
    #: The bytes of the gradients of its results.
    tangent_bytes: int

    @property
    def most_careful(self) -> PartWay:
        return min(self.ways, key=lambda way: (way.held + max(way.forward, way.backward), way.held, way.seconds))

    @property
    def fastest(self) -> PartWay:
        return min(self.ways, key=lambda way: (way.seconds, way.held, way.backward))


#: So many plans of a graph are tried.
_MOST_TRIED = 48


def menu_of(planner: JointPlanner, joint: Joint, *, inputs: int, also: Iterable[tuple[int, ...]] = ()) -> PartMenu:
    """The undominated ways of a part that is called with so many inputs, and those of the plans in `also`."""
    kept = {way_of(planner, chosen, joint, inputs=inputs): None for chosen in also}
    tried = [way_of(planner, chosen, joint, inputs=inputs) for chosen in planner.alternatives(_MOST_TRIED)]
    undominated: list[PartWay] = []
    for way in sorted(tried, key=lambda way: (way.seconds, way.held, way.backward, way.forward, way.chosen)):
        if not any(_beats(one, way) for one in undominated):
            undominated.append(way)
    ways = dict.fromkeys((*kept, *undominated))
    in_order = sorted(ways, key=lambda way: (way.held, -way.seconds, way.backward, way.forward, way.chosen))
    return PartMenu(tuple(in_order), sum(map(planner.model.size.__getitem__, joint.tangents)))


def way_of(planner: JointPlanner, chosen: tuple[int, ...], joint: Joint, *, inputs: int) -> PartWay:
    """One plan of a part."""
    model = planner.model
    found = simulate_part(model, planner.saved(chosen))
    # Parameters and tokens that the caller does not pass come first.
    passed = {node: at for at, node in enumerate(joint.inputs[max(len(joint.inputs) - inputs, 0) :])}
    numbers = frozenset(passed[node] for node in found.saved_inputs if node in passed)
    if len(joint.inputs) < inputs:
        # Equal inputs were joined, so which ones are read is not known.
        numbers = frozenset(range(inputs))
    outputs = joint.forward_outputs[len(joint.mutated) :]
    results = frozenset(
        at for at, value in enumerate(outputs) if isinstance(value, Node) and model.base[value] in found.saved_results
    )
    return PartWay(
        chosen, planner.seconds(chosen), found.held, found.forward_peak, found.backward_peak, numbers, results
    )


def _beats(one: PartWay, other: PartWay) -> bool:
    return (
        one.seconds <= other.seconds
        and one.held <= other.held
        and one.forward <= other.forward
        and one.backward <= other.backward
        and one.inputs <= other.inputs
        and one.results <= other.results
    )
