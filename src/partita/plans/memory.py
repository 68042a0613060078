"""What recomputation saves and costs: bytes that autograd holds for a region without and with it, and FLOPs it adds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from torch.fx import Node

from partita.errors import PartitaError, TreatmentError
from partita.plans.treatment import Treatment
from partita.program.saved_tensors import Memory, Origin, SavedTensors, bytes_in, saved_tensors_of
from partita.regions import Partition, Region

__all__ = ["ReportsSavedBytes", "SavedBytes", "SavedMemory", "saved_bytes_of", "saved_memory"]


@final
@dataclass(frozen=True, slots=True)
class SavedBytes:
    """The memory that autograd holds for a region, beside parameters, buffers and constants, which are held anyway.

    Memory that two regions hold belongs to both, so bytes of regions do not add up; `SavedMemory.total` counts it once.
    """

    #: What the operators of the region save when it runs as it is.
    plain: frozenset[Memory]
    #: What is held once it is treated.
    treated: frozenset[Memory]
    #: The FLOPs by which one backward grows.
    extra_flops: int

    @property
    def plain_bytes(self) -> int | None:
        """None where a size is only known once the program runs."""
        return bytes_in(self.plain)

    @property
    def treated_bytes(self) -> int | None:
        """None where a size is only known once the program runs."""
        return bytes_in(self.treated)


@final
@dataclass(frozen=True, slots=True)
class SavedMemory:
    """What each region of a plan holds, None where its treatment does not say, and the whole program.

    Nothing is known where there is a `reason`.
    """

    regions: tuple[SavedBytes | None, ...]
    total: SavedBytes | None = None
    reason: str | None = None


@runtime_checkable
class ReportsSavedBytes(Protocol):
    """A treatment that changes what autograd holds for a region."""

    def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
        """What is held for the region; None where that is not known. `saved_bytes_of` answers it for recomputation."""


def saved_memory(
    partition: Partition, treatments: Sequence[Treatment], saved: SavedTensors | None = None
) -> SavedMemory:
    """What autograd holds under these treatments; those that do not say change nothing, as far as the total goes.

    Without `saved`, the program is run once on tensors without memory.
    """
    saved = saved_tensors_of(partition.program) if saved is None else saved
    if saved.reason is not None:
        return SavedMemory((None,) * len(partition), reason=saved.reason)
    found = [
        _told(treatment, region, saved) if isinstance(treatment, ReportsSavedBytes) else None
        for region, treatment in zip(partition, treatments, strict=True)
    ]
    return SavedMemory(tuple(found), _total(partition, found, saved))


def saved_bytes_of(region: Region, saved: SavedTensors, kept: Collection[Node] = ()) -> SavedBytes | None:
    """What a region holds that is recomputed but for the results of `kept`.

    Autograd then holds what goes into the region and what is kept; in the place of what it is given and is written, by
    itself or later, a copy from before. It is computed again up to the last node that saves something, and of that only
    what comes before the saving. A region for which autograd holds nothing is left alone. The random state, a few
    kilobytes for a region that draws, is not counted.
    """
    if saved.reason is not None:
        return None
    nodes = _in_order(region, saved)
    plain = saved.held(nodes)
    if not any(saved.of(node).saves for node in nodes):
        return SavedBytes(plain, frozenset(), 0)
    operands = set(_operands(region, saved))
    written = _written(region, operands, saved)
    made = (memory for node in kept for memory in saved.of(node).computes)
    held = {memory for memory in (*(operands - written), *made) if memory.origin is not Origin.STATE}
    copies = {Memory(memory.bytes, Origin.INSIDE, memory.node) for memory in written}
    return SavedBytes(plain, frozenset(held | copies), _recomputed_flops(nodes, frozenset(kept), saved))


def _told(treatment: ReportsSavedBytes, region: Region, saved: SavedTensors) -> SavedBytes | None:
    try:
        found: object = treatment.saved_bytes(region, saved)
    except PartitaError:
        raise
    except Exception as error:
        raise TreatmentError(
            f"{treatment!r} raised {type(error).__name__} when asked what region {region.name!r} holds: {error}"
        ) from error
    if found is not None and not isinstance(found, SavedBytes):
        raise TreatmentError(
            f"{treatment!r} gave {type(found).__name__} as what region {region.name!r} holds; `saved_bytes` returns a "
            "SavedBytes, such as `saved_bytes_of` gives, or None"
        )
    return found


def _in_order(region: Region, saved: SavedTensors) -> list[Node]:
    return sorted(region.nodes, key=saved.program.index.number.__getitem__)


def _operands(region: Region, saved: SavedTensors) -> Iterator[Memory]:
    """What goes into a region; items are taken out of a container where that is made."""
    program, inside = saved.program, set(region.nodes)
    number, projections = program.index.number, program.projections

    def is_inside(node: Node) -> bool:
        while _holds(projections, number[node]):
            node = node.all_input_nodes[0]
        return node in inside

    for node in filter(is_inside, region.nodes):
        for read in node.all_input_nodes:
            if not is_inside(read):
                yield from saved.of(read).gives


def _holds(numbers: Sequence[int], number: int) -> bool:
    """Whether a number is among sorted ones."""
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number


def _written(region: Region, operands: Collection[Memory], saved: SavedTensors) -> set[Memory]:
    """What the region is given and is written, in it or after it has run."""
    inside, number = set(region.nodes), saved.program.index.number
    first = min(number[node] for node in region.nodes)
    written = {memory for node in region.nodes for memory in saved.of(node).writes if memory.node not in inside}
    for memory in operands:
        others = (writer for writer in reversed(saved.writers.get(memory, ())) if writer not in inside)
        last = next(others, None)
        if last is not None and number[last] > first:
            written.add(memory)
    return written


def _recomputed_flops(nodes: Sequence[Node], kept: frozenset[Node], saved: SavedTensors) -> int:
    last = max(place for place, node in enumerate(nodes) if saved.of(node).flops_until_saved is not None)
    flops = sum(saved.of(node).flops for node in nodes[:last] if node not in kept)
    return flops + (0 if nodes[last] in kept else saved.of(nodes[last]).flops_until_saved or 0)


def _total(partition: Partition, found: Sequence[SavedBytes | None], saved: SavedTensors) -> SavedBytes | None:
    """The whole program: what is outside of the regions that were told of is held as before."""
    told = [
        (region, saved_bytes) for region, saved_bytes in zip(partition, found, strict=True) if saved_bytes is not None
    ]
    treated = {node for region, _ in told for node in region.nodes}
    outside = saved.held(node for node in saved.nodes if node not in treated)
    return SavedBytes(
        saved.held(),
        outside.union(*(saved_bytes.treated for _, saved_bytes in told)),
        sum(saved_bytes.extra_flops for _, saved_bytes in told),
    )
