"""Saved for backward: bytes that each region saves without and with its treatment, and FLOPs that are recomputed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.fx import Node

from partita._torch.modes import fresh_modes, read_ambient
from partita.analysis.modes import AMBIENT, Autocast, Grad, Inference, Mode
from partita.errors import OptionError, PartitaError, TreatmentError
from partita.plans.treatment import Treatment
from partita.program.saved_tensors import Memory, Origin, SavedTensors, bytes_in, parameters_of, saved_tensors_of
from partita.regions import Partition, Region

__all__ = ["ReportsSavedBytes", "SavedBytes", "SavedMemory", "saved_bytes_of", "saved_memory"]


@final
@dataclass(frozen=True, slots=True)
class SavedBytes:
    """The memory that is saved for backward in a region, without parameters, buffers and constants.

    Memory that two regions save belongs to both, so bytes of regions do not add up; `SavedMemory.total` counts it once.
    """

    #: Saved when the region runs untreated.
    plain: frozenset[Memory]
    #: Saved when the region is treated.
    treated: frozenset[Memory]
    #: The FLOPs that one backward recomputes.
    extra_flops: int

    @property
    def plain_bytes(self) -> int | None:
        """None where a size is only known once the program runs."""
        return bytes_in(self.plain)

    @property
    def treated_bytes(self) -> int | None:
        """None where a size is only known once the program runs."""
        return bytes_in(self.treated)

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward makes memory again that was not kept."""
        return not self.plain <= self.treated

    @property
    def recomputing_bytes(self) -> int | None:
        """What is alive of the region once it is recomputed: all that autograd saves, and what was saved before.

        Temporaries, and copies of what a region mutates, come on top while it runs.
        """
        return bytes_in(self.plain | self.treated)


@final
@dataclass(frozen=True, slots=True)
class SavedMemory:
    """What each region of a plan saves, None where its treatment does not report it, and the whole program.

    Nothing is known where there is a `reason`. It prints as a few lines.
    """

    regions: tuple[SavedBytes | None, ...]
    total: SavedBytes | None = None
    reason: str | None = None
    #: The modes of the caller that it is counted for; gradients are on and autocast is off where they say nothing else.
    caller: Mode = AMBIENT
    #: The bytes of all parameters; one with several names counts once.
    parameter_bytes: int = 0
    #: The bytes of a gradient for each parameter that requires one.
    gradient_bytes: int = 0
    #: The region of which most is alive once it is recomputed (`recomputing_bytes`); None if none is recomputed.
    largest: Region | None = None
    #: What that is; None where a size is only known once the program runs.
    largest_bytes: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The whole program: what is saved and recomputed, and the modes; memory of several regions counts once."""
        if self.total is None:
            yield f"saved for backward: not known: {self.reason}"
        else:
            plain, treated = self.total.plain_bytes, self.total.treated_bytes
            yield (
                f"saved for backward: {shown_count(plain)} bytes, {shown_count(treated)} after; "
                f"{self.total.extra_flops:,} FLOPs are recomputed"
            )
        yield f"  called under: {_in_words(self.caller)}"
        yield f"  parameters: {self.parameter_bytes:,} bytes; gradients: {self.gradient_bytes:,} bytes"
        if self.largest is not None:
            alive = shown_count(self.largest_bytes)
            yield f"  largest recomputed region: {self.largest.name}, {alive} bytes while its backward runs"


def shown_count(number: int | None) -> str:
    """A number for printing; a question mark where it is not known."""
    return "?" if number is None else f"{number:,}"


#: The modes that a program is called under, as the context managers that the call is in; the outermost first.
CallerContexts = AbstractContextManager[Any] | Sequence[AbstractContextManager[Any]]

_MODE_CONTEXTS = (torch.autocast, torch.no_grad, torch.enable_grad, torch.inference_mode)


def caller_mode(under: CallerContexts) -> Mode:
    """The mode inside of these blocks of autocast, `no_grad`, `enable_grad` or `inference_mode`; each can be reused."""
    found: Any = under
    contexts = tuple(found) if isinstance(found, list | tuple) else (found,)
    for context in contexts:
        if not isinstance(context, _MODE_CONTEXTS):
            raise OptionError(
                f"`under` takes the modes that the program is called under, such as torch.autocast('cuda', "
                f"torch.bfloat16) or torch.no_grad(), not {context!r}"
            )
    devices = {context.device for context in contexts if isinstance(context, torch.autocast)}
    with fresh_modes(grad=True), ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        inside = read_ambient()
    blocks = (Autocast(device, dtype, on, inside.autocast_cache) for device, on, dtype in inside.autocast)
    autocast = tuple(block for block in blocks if block.device in devices)
    if all(isinstance(context, torch.autocast) for context in contexts):
        return Mode(autocast=autocast)
    return Mode(inside.grad, inside.inference, autocast)


def _in_words(caller: Mode) -> str:
    grad = Inference(True) if caller.inference else Grad(caller.grad is not False)
    return ", ".join([str(grad), *(map(str, caller.autocast) if caller.autocast else ["no autocast"])])


@runtime_checkable
class ReportsSavedBytes(Protocol):
    """A treatment that changes what is saved for backward in a region."""

    def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
        """What the region saves; None where that is not known. `saved_bytes_of` computes it for recomputation."""


def saved_memory(
    partition: Partition, treatments: Sequence[Treatment], saved: SavedTensors | None = None
) -> SavedMemory:
    """What is saved for backward under these treatments; in the total, those that do not report change nothing.

    Without `saved`, the program is run once on fake tensors.
    """
    saved = saved_tensors_of(partition.program) if saved is None else saved
    parameters = parameters_of(partition.program)
    known = SavedMemory(
        (None,) * len(partition),
        reason=saved.reason,
        caller=saved.caller,
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
    )
    if saved.reason is not None:
        return known
    found = [
        _reported(treatment, region, saved) if isinstance(treatment, ReportsSavedBytes) else None
        for region, treatment in zip(partition, treatments, strict=True)
    ]
    largest, its_bytes = _largest(partition, found)
    total = _total(partition, found, saved)
    return replace(known, regions=tuple(found), total=total, largest=largest, largest_bytes=its_bytes)


def saved_bytes_of(region: Region, saved: SavedTensors, kept: Collection[Node] = ()) -> SavedBytes | None:
    """What a region saves if all but the results of `kept` is recomputed.

    Saved are its inputs and what is kept; in the place of an input that is mutated, in the region or later, a copy from
    before. It is recomputed up to the last node that saves something, and of that only what comes before the saving. A
    region that saves nothing is not treated. The RNG state, a few kilobytes where the region uses it, is not counted.
    """
    if saved.reason is not None:
        return None
    nodes = sorted(region.nodes, key=saved.program.index.number.__getitem__)
    plain = saved.memory(nodes)
    if not any(saved.of(node).saves for node in nodes):
        return SavedBytes(plain, frozenset(), 0)
    inputs = set(_inputs(region, saved))
    mutated = _mutated(region, inputs, saved)
    results = _kept_results(nodes, frozenset(kept), saved)
    held = {memory for memory in (*(inputs - mutated), *results) if memory.origin is not Origin.STATE}
    copies = {Memory(memory.bytes, Origin.INSIDE, memory.node) for memory in mutated}
    return SavedBytes(plain, frozenset(held | copies), _recomputed_flops(nodes, frozenset(kept), saved))


def _reported(treatment: ReportsSavedBytes, region: Region, saved: SavedTensors) -> SavedBytes | None:
    try:
        found: object = treatment.saved_bytes(region, saved)
    except PartitaError:
        raise
    except Exception as error:
        raise TreatmentError(
            f"{treatment!r} raised {type(error).__name__} in `saved_bytes` for region {region.name!r}: {error}"
        ) from error
    if found is not None and not isinstance(found, SavedBytes):
        raise TreatmentError(
            f"{treatment!r} returned {type(found).__name__} from `saved_bytes` for region {region.name!r}; return a "
            "SavedBytes, for example by `saved_bytes_of`, or None"
        )
    return found


def _largest(partition: Partition, found: Sequence[SavedBytes | None]) -> tuple[Region | None, int | None]:
    """The region with most bytes alive once it is recomputed, the first of equals; an unknown number is the most."""
    regions = zip(partition, found, strict=True)
    alive = [(region, one.recomputing_bytes) for region, one in regions if one is not None and one.is_recomputed]
    return max(alive, key=lambda pair: inf if pair[1] is None else pair[1], default=(None, None))


def _inputs(region: Region, saved: SavedTensors) -> Iterator[Memory]:
    """The memory of the inputs of a region; items are taken out of a container where that is made."""
    program, inside = saved.program, set(region.nodes)
    number, projecting = program.index.number, program.projections

    def is_inside(node: Node) -> bool:
        while number[node] in projecting:
            node = node.all_input_nodes[0]
        return node in inside

    for node in filter(is_inside, region.nodes):
        for read in node.all_input_nodes:
            if not is_inside(read):
                yield from saved.of(read).returns


def _kept_results(nodes: Sequence[Node], kept: frozenset[Node], saved: SavedTensors) -> set[Memory]:
    """The results of kept nodes; of neighbours, which are kept together, casts for the next operator are recomputed."""
    modes, number = saved.program.modes, saved.program.index.number
    results: set[Memory] = set()
    casts, mode = tuple[Memory, ...](), AMBIENT
    for node in nodes:
        if node not in kept or modes.at(number[node]) != mode:
            casts, mode = (), modes.at(number[node])
        if node not in kept:
            continue
        run = saved.of(node)
        if run.computes:
            results.difference_update(casts)
            casts = run.casts
        results.update(run.computes)
    return results


def _mutated(region: Region, inputs: Collection[Memory], saved: SavedTensors) -> set[Memory]:
    """The inputs that are mutated, in the region or after it has run."""
    inside, number = set(region.nodes), saved.program.index.number
    first = min(number[node] for node in region.nodes)
    mutated = {memory for node in region.nodes for memory in saved.of(node).mutates if memory.node not in inside}
    for memory in inputs:
        others = (mutator for mutator in reversed(saved.mutators.get(memory, ())) if mutator not in inside)
        last = next(others, None)
        if last is not None and number[last] > first:
            mutated.add(memory)
    return mutated


def _recomputed_flops(nodes: Sequence[Node], kept: frozenset[Node], saved: SavedTensors) -> int:
    last = max(at for at, node in enumerate(nodes) if saved.of(node).flops_until_saved is not None)
    flops = sum(saved.of(node).flops for node in nodes[:last] if node not in kept)
    return flops + (0 if nodes[last] in kept else saved.of(nodes[last]).flops_until_saved or 0)


def _total(partition: Partition, found: Sequence[SavedBytes | None], saved: SavedTensors) -> SavedBytes:
    """The whole program: what is outside of the reported regions is saved as before."""
    reported = [(region, one) for region, one in zip(partition, found, strict=True) if one is not None]
    treated = {node for region, _ in reported for node in region.nodes}
    outside = saved.memory(node for node in saved.nodes if node not in treated)
    return SavedBytes(
        saved.memory(),
        outside.union(*(one.treated for _, one in reported)),
        sum(one.extra_flops for _, one in reported),
    )
