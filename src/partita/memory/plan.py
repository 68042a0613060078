"""The fastest training step whose memory peak fits a budget: planned, printed, applied."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._html import html_table
from partita.analysis.nodes import value_of
from partita.capture import capture
from partita.errors import BudgetError, OptionError
from partita.memory._torch.workspaces import LIBRARY_BYTES
from partita.memory.budget import MemoryBudget, bytes_said, check_device_has, shown_bytes
from partita.memory.chain import Chain, StepOptions, Way, chain_of
from partita.memory.communication import is_wrapped_for_ddp
from partita.memory.optimizer_state import optimizer_bytes
from partita.memory.picture import Picture
from partita.memory.program_state import states_of, user_outputs
from partita.memory.rates import Rates, measure_rates, shown_milliseconds, two_digits
from partita.memory.segments import Checkpoints, checked_checkpoints, checkpoints_of, segments_of
from partita.memory.timeline import Timeline, timeline_of
from partita.memory.trials import Input, Segment, trial_of
from partita.plans import Plan
from partita.program.program import Program
from partita.recompute import KeepNodes, KeepNothing, Recompute
from partita.regions import Partition
from partita.solvers.ladder import Ladder
from partita.solvers.peak import Stage, fastest, ladder_of, least_peak, peak_of

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """What is done to one segment of a step."""

    name: str
    is_recomputed: bool
    #: The names of the nodes whose results are kept, if it is recomputed.
    kept: tuple[str, ...]
    #: The bytes that it leaves allocated between forward and backward; negative if it frees more.
    held_bytes: int
    #: The seconds that recomputation adds, by the rates of the device.
    extra_seconds: float


@final
@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a pickle keeps of a memory plan: its text and its numbers, without the model that it was made for."""

    text: str = field(repr=False)
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int

    def __str__(self) -> str:
        return self.text


@final
@dataclass(frozen=True)
class MemoryPlan:
    """A training step that fits: which segments are recomputed, what they keep, and the peak that follows.

    It prints as a table. `module()` is the model that runs so.
    """

    chain: Chain = field(repr=False)
    #: For each segment the number of the way to run it.
    chosen: tuple[int, ...]
    budget: MemoryBudget
    #: The budget, the peak of this step, and the peak of the step without recomputation, in bytes.
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    #: The state of the optimizer, and whatever else was said to be allocated throughout.
    extra_bytes: int = 0

    @property
    def ways(self) -> tuple[Way, ...]:
        """The way to run each segment."""
        return tuple(link.ways[number] for link, number in zip(self.chain.links, self.chosen, strict=True))

    @cached_property
    def segments(self) -> tuple[SegmentChoice, ...]:
        """What is done to each segment, in the order of the forward."""
        return tuple(
            SegmentChoice(
                link.region.name,
                way.is_recomputed,
                tuple(link.region.nodes[place].name for place in way.kept),
                way.trial.held,
                link.extra_seconds(way),
            )
            for link, way in zip(self.chain.links, self.ways, strict=True)
        )

    @property
    def extra_seconds(self) -> float:
        """The seconds that recomputation adds to a step, by the rates of the device."""
        return sum(segment.extra_seconds for segment in self.segments)

    @property
    def plain_seconds(self) -> float:
        """The seconds of a step without recomputation, by the rates of the device."""
        return self.chain.seconds

    @cached_property
    def timeline(self) -> Timeline:
        """The bytes allocated after every operator of the step."""
        return timeline_of(self.chain, self.ways, extra_bytes=self.extra_bytes)

    @cached_property
    def plain_timeline(self) -> Timeline:
        """The same without recomputation."""
        plain = [link.ways[0] for link in self.chain.links]
        return timeline_of(self.chain, plain, extra_bytes=self.extra_bytes)

    def picture(self) -> Picture:
        """The bytes over the step, planned and without recomputation, with the budget; prints as a chart."""
        return Picture(self.timeline, self.plain_timeline, self.budget_bytes)

    @cached_property
    def plan(self) -> Plan:
        """The plan that recomputes the chosen segments."""
        chosen = [(segment, link.region) for segment, link in zip(self.segments, self.chain.links, strict=True)]
        recomputed = [(segment, region) for segment, region in chosen if segment.is_recomputed]
        reasons = {
            node: f"the budget has room for what {segment.name} saves, so it is not recomputed"
            for segment, region in chosen
            if not segment.is_recomputed
            for node in region.nodes
        }
        regions = [region for _, region in recomputed]
        partition = Partition(self.chain.program, regions, reasons).returning_in_graph_order()
        treatments = [Recompute(KeepNodes(*one.kept) if one.kept else KeepNothing()) for one, _ in recomputed]
        return Plan(partition, tuple(treatments))

    @cached_property
    def program(self) -> Program:
        """The program that runs so; it shares the parameters of the model."""
        return self.plan.apply() if any(way.is_recomputed for way in self.ways) else self.chain.program

    def module(self) -> GraphModule:
        """The model that runs so, called like the original; the parameters are the same objects."""
        return self.program.module()

    def __str__(self) -> str:
        return "\n".join((*self._table(), *self._summary()))

    def __deepcopy__(self, _: object) -> MemoryPlan:
        """The plan itself: it does not change, and copies of the fitted module run as it says."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanSummary, (str(self), self.budget_bytes, self.peak_bytes, self.plain_peak_bytes)

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return html_table(head, rows, notes=list(self._summary())) + self.picture().svg()

    def _table(self) -> Iterator[str]:
        rows = self._rows()
        widths = [max(len(row[at]) for row in rows) for at in range(5)]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """A head, and a row for neighbours that are treated alike."""
        rows = [("segment", "does", "keeps", "holds", "adds")]
        for same, group in groupby(self.segments, key=lambda one: (one.is_recomputed, len(one.kept), one.held_bytes)):
            members = list(group)
            first, last = members[0], members[-1]
            name = first.name if first is last else f"{first.name} .. {last.name}"
            does = "recompute" if same[0] else "keep"
            keeps = _listed(first.kept) if same[0] else "what autograd saves"
            adds = shown_milliseconds(sum(one.extra_seconds for one in members)) if same[0] else ""
            rows.append((name, does, keeps, shown_bytes(sum(one.held_bytes for one in members)), adds))
        return rows

    def _summary(self) -> Iterator[str]:
        peak = self.timeline.peak
        where = f" in {peak.path}" if peak.path else ""
        yield (
            f"peak {shown_bytes(self.peak_bytes)} of {shown_bytes(self.budget_bytes)} allowed; "
            f"without recomputation {shown_bytes(self.plain_peak_bytes)}"
        )
        yield f"  when: {peak.phase} of {peak.segment}, {peak.operator} for {peak.node or 'no node'}{where}"
        resident, gradients = self.timeline.resident_bytes, self.timeline.gradient_bytes
        yield f"  allocated throughout: {shown_bytes(resident)}; gradients and results so far: {shown_bytes(gradients)}"
        for occupant in self.timeline.occupants[:6]:
            yield f"  {occupant}"
        extra, plain = self.extra_seconds, self.plain_seconds
        part = two_digits(100 * extra / plain if plain else 0)
        yield f"recomputation adds {shown_milliseconds(extra)} to {shown_milliseconds(plain)} ({part} %)"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "inputs"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def fit(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    peak: str | int | float,
    optimizer: torch.optim.Optimizer | int = 0,
    communication: str | int = 0,
    rates: Rates | None = None,
    keeps_outputs: bool = True,
    checkpoints: Checkpoints = "replan",
) -> GraphModule:
    """A module like `model` whose training step, forward and backward, takes at most `peak` bytes.

    Example::

        class Loss(torch.nn.Module):  # the model returns its loss
            def __init__(self):
                super().__init__()
                self.up = torch.nn.ModuleList(torch.nn.Linear(8, 32) for _ in range(6))
                self.down = torch.nn.ModuleList(torch.nn.Linear(32, 8) for _ in range(6))

            def forward(self, x):
                for up, down in zip(self.up, self.down):
                    x = down(torch.nn.functional.gelu(up(x)))
                return x.square().mean()

        batch = torch.randn(512, 8)
        fitted = partita.fit(Loss(), (batch,), peak=0.6)  # or peak="11GB"
        print(fitted.memory_plan)  # what is recomputed, and the peak that follows
        fitted(batch).backward()

    It is the fastest that `step_memory(...).plan(peak)` finds; its plan is in the attribute `memory_plan`.
    """
    MemoryBudget(peak)
    step = step_memory(
        model,
        args,
        kwargs,
        optimizer=optimizer,
        communication=communication,
        rates=rates,
        keeps_outputs=keeps_outputs,
        checkpoints=checkpoints,
    )
    found = step.plan(peak)
    log.info("%s", found)
    module = found.module()
    module.memory_plan = found  # type: ignore[assignment]
    return module


def step_memory(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | int = 0,
    communication: str | int = 0,
    rates: Rates | None = None,
    keeps_outputs: bool = True,
    checkpoints: Checkpoints = "replan",
) -> StepMemory:
    """The memory of a training step of `model` with these arguments, run eagerly, and ways to recompute parts of it.

    The model returns its loss, alone or beside other results, which count as allocated during the backward unless
    `keeps_outputs` is false. The state of the `optimizer` is allocated throughout; it can be given in bytes. So is
    what `communication` takes under data parallelism, in bytes (`communication_bytes` estimates it). `rates` are those
    of the device, measured if omitted. Nothing else is run but on fake tensors. Calls of `torch.utils.checkpoint` are
    planned like all else, or, with `checkpoints="respect"`, recomputed from their inputs in every plan.
    """
    if not torch.is_grad_enabled():
        raise BudgetError("gradients are disabled here, so there is no training step to fit; call this outside no_grad")
    if is_wrapped_for_ddp(model):
        raise OptionError(
            "the step of a model is fitted before it is wrapped: DistributedDataParallel(partita.fit(...))"
        )
    extra = optimizer_bytes(optimizer) + bytes_said(communication, "communication")
    device, dtype = _device_and_dtype(model)
    extra += LIBRARY_BYTES if device.type == "cuda" else 0
    respects = checked_checkpoints(checkpoints) == "respect"
    program = capture(model, tuple(args), dict(kwargs or {}))
    options = StepOptions(rates or measure_rates(device, dtype), keeps_outputs, 512 if device.type == "cuda" else 1)
    fixed = checkpoints_of(program) if respects else ()
    names = [region.name for region in fixed]
    return StepMemory(chain_of(program, segments_of(program, fixed), options, recomputed=names), options, extra, device)


@final
@dataclass(frozen=True)
class StepMemory:
    """A training step as a chain of segments, each with ways to recompute it; `plan` chooses among them."""

    chain: Chain = field(repr=False)
    options: StepOptions
    extra_bytes: int
    device: torch.device

    @property
    def resident_bytes(self) -> int:
        """Parameters, buffers, arguments, the optimizer's state, communication, libraries: allocated throughout."""
        return self.chain.resident_bytes + self.extra_bytes

    @cached_property
    def plain_peak_bytes(self) -> int:
        """The peak of the step without recomputation."""
        return self._peak_bytes((0,) * len(self._stages))

    @cached_property
    def smallest_peak_bytes(self) -> int:
        """The peak of the plan that takes least."""
        return self._smallest[0]

    def plan(self, peak: str | int | float) -> MemoryPlan:
        """The fastest plan whose peak is at most `peak`; a `BudgetError` with the smallest peak if there is none."""
        budget = MemoryBudget(peak)
        allowed = budget.bytes(self.plain_peak_bytes)
        check_device_has(allowed, self.device)
        if allowed <= self.resident_bytes:
            raise BudgetError(
                f"the parameters, buffers, arguments, the state of the optimizer and communication alone take "
                f"{shown_bytes(self.resident_bytes)}, and the budget is {shown_bytes(allowed)}; shard the model, or "
                f"use a smaller dtype. The smallest peak is {shown_bytes(self.smallest_peak_bytes)} "
                f"({self.smallest_peak_bytes} bytes)",
                smallest=self.smallest_peak_bytes,
            )
        if self.plain_peak_bytes <= allowed:
            return self._planned([0] * len(self._stages), budget, allowed, self.plain_peak_bytes)
        if self.smallest_peak_bytes > allowed:
            raise _infeasible(self._planned(self._smallest[1], budget, allowed, self.smallest_peak_bytes))
        chosen = self._fastest_that_fits(allowed)
        return self._planned(chosen, budget, allowed, self._peak_bytes(chosen))

    def curve(self, points: int = 8) -> tuple[MemoryPlan, ...]:
        """Plans from the smallest peak to that of the plain step, at budgets that are evenly spaced; each once."""
        if isinstance(points, bool) or not isinstance(points, int) or points < 2:
            raise OptionError(f"a curve has at least 2 points, not {points!r}")
        least, most = self.smallest_peak_bytes, self.plain_peak_bytes
        asked = [least + (most - least) * at // (points - 1) for at in range(points)]
        plans = {found.peak_bytes: found for peak in asked if (found := self.plan(peak))}
        return tuple(plans[peak] for peak in sorted(plans))

    @cached_property
    def _stages(self) -> list[Stage]:
        return self.chain.stages()

    @cached_property
    def _smallest(self) -> tuple[int, tuple[int, ...]]:
        """The least peak and its choices, the fastest of these; in small steps recomputation may take more."""
        least, chosen = least_peak(self._stages)
        chosen, plain = fastest(self._stages, least) or chosen, (0,) * len(self._stages)
        return min((self.plain_peak_bytes, plain), (self._peak_bytes(chosen), chosen))

    def _fastest_that_fits(self, allowed: int) -> tuple[int, ...]:
        """The choices of a plan, where the plain step does not fit, and the one that takes least does."""
        room = allowed - self.resident_bytes
        return self._ladder.at_by_trial(room, self._peak_beside) if self._adds_up else self._ladder.at(room)

    @cached_property
    def _ladder(self) -> Ladder:
        """The plans between the smallest peak and that of the plain step, ordered by what they take."""
        plain, stages = (0,) * len(self._stages), self._stages
        peak = partial(peak_of, stages) if self._adds_up else self._peak_beside
        return ladder_of(stages, peak, slow=self._smallest[1], fast=plain)

    @cached_property
    def _adds_up(self) -> bool:
        """Whether both the plain step and the one that takes least have the peak that follows from their segments."""
        ends = ((0,) * len(self._stages), self._smallest[1])
        return all(self._peak_beside(chosen) == peak_of(self._stages, chosen) for chosen in ends)

    def _peak_beside(self, chosen: tuple[int, ...]) -> int:
        return self._peak_bytes(chosen) - self.resident_bytes

    def _planned(self, chosen: Sequence[int], budget: MemoryBudget, allowed: int, found: int) -> MemoryPlan:
        return MemoryPlan(self.chain, tuple(chosen), budget, allowed, found, self.plain_peak_bytes, self.extra_bytes)

    def _peak_bytes(self, chosen: tuple[int, ...]) -> int:
        """The peak of the whole step on fake tensors; of a large program, the one that follows from its segments."""
        predicted = self.resident_bytes + peak_of(self._stages, chosen)
        if len(self.chain.program.index.nodes) > _MOST_NODES:
            return predicted
        if chosen not in self._tried:
            plan = MemoryPlan(self.chain, chosen, MemoryBudget(1), predicted, predicted, predicted)
            self._tried[chosen] = self.resident_bytes + peak_of_program(plan.program, self.chain, self.options)
        return self._tried[chosen]

    @cached_property
    def _tried(self) -> dict[tuple[int, ...], int]:
        """The peaks of whole steps that were tried."""
        return {}


def budget_curve(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 8,
    optimizer: torch.optim.Optimizer | int = 0,
    communication: str | int = 0,
    rates: Rates | None = None,
    checkpoints: Checkpoints = "replan",
) -> tuple[MemoryPlan, ...]:
    """What less memory costs: plans from the smallest peak to that of the plain step."""
    step = step_memory(
        model, args, kwargs, optimizer=optimizer, communication=communication, rates=rates, checkpoints=checkpoints
    )
    return step.curve(points)


#: The most nodes of a program that is also tried as a whole.
_MOST_NODES = 3_000


def peak_of_program(program: Program, chain: Chain, options: StepOptions) -> int:
    """The highest point of forward and backward of a program on fake tensors, beside what is allocated throughout."""
    states = states_of(chain.program)
    module = program.graph_module
    values = {node: states.get(node.name, value_of(node)) for node in module.graph.find_nodes(op="placeholder")}
    inputs = tuple(
        Input(node, True, isinstance(value, Tensor) and value.requires_grad, False) for node, value in values.items()
    )
    output = module.graph.output_node()
    returned = list(output.args[0]) if isinstance(output.args[0], tuple | list) else [output.args[0]]
    results = user_outputs(program, output)
    loss = results[chain.loss]
    segment = Segment(
        module,
        inputs,
        tuple(node is loss for node in returned),
        tuple(node in results and options.keeps_outputs for node in returned),
    )
    trial = trial_of(segment, module, options.rates, rounding=options.rounding)
    return max(trial.forward, trial.backward)


def _infeasible(smallest: MemoryPlan) -> BudgetError:
    """The error for a budget below the peak of the plan that takes least."""
    timeline = smallest.timeline
    largest = [str(one) for one in timeline.occupants[:3]]
    return BudgetError(
        f"no plan takes at most {shown_bytes(smallest.budget_bytes)}; the smallest peak is "
        f"{shown_bytes(smallest.peak_bytes)} ({smallest.peak_bytes} bytes), in the {timeline.peak.phase} of "
        f"{timeline.peak.segment}: {shown_bytes(timeline.resident_bytes)} of parameters, buffers, arguments and other "
        f"state, {shown_bytes(timeline.gradient_bytes)} of gradients and results, and most of the rest are "
        f"{'; '.join(largest)}. Allow that much, or use smaller batches",
        smallest=smallest.peak_bytes,
    )


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.float32
