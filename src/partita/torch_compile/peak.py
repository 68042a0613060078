"""Training steps that are compiled to fit a memory budget: a partitioner of joint graphs, and the option `peak`.

The partitioner plans which values are saved for backward, so that the step is fastest and its peak fits. On a GPU the
peak of the first steps is measured; where it is over the budget, the step is planned and compiled once more. Graphs
that are parts of one step are planned together in `steps.py`, and compiled here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from threading import RLock
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from partita._torch.fake_tensors import fake_mode_in
from partita._torch.gc_pause import gc_paused
from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import has_nested_tensors, value_of
from partita.analysis.projections import with_items
from partita.backends._torch.partitioners import drop_forward_effects, let_inductor_take, partition_saving
from partita.errors import BudgetError, OptionError, RecomputeError
from partita.memory._torch.workspaces import LIBRARY_BYTES
from partita.memory.budget import MemoryBudget, bytes_said, check_device_has, shown_bytes
from partita.memory.joint.part import PartMenu, PartWay, menu_of, way_of
from partita.memory.joint.plan import JointMemoryPlan, JointPlanner, JointStep
from partita.memory.optimizer_state import bytes_to_come
from partita.memory.rates import Rates, measure_rates
from partita.memory.segments import Checkpoints, checked_checkpoints
from partita.program.joint import Joint
from partita.program.program import Program
from partita.torch_compile._torch.backends import numbers_of, own_tracing_context, without_tracing_for_others
from partita.torch_compile._torch.peak import compile_with_partitioner, copied_graph
from partita.torch_compile.frames import PlaceInStep
from partita.torch_compile.joint_mutations import check_recomputed_reads, is_functionalized, nodes_before_updates
from partita.torch_compile.pieces import lost_backward
from partita.torch_compile.steps import Steps

log = logging.getLogger(__name__)


def memory_partition(
    peak: str | int | float,
    *,
    fuses: bool = True,
    rates: Rates | None = None,
    resident_bytes: int | None = None,
    communication: str | int = 0,
    optimizer: torch.optim.Optimizer | int = 0,
    checkpoints: Checkpoints = "replan",
) -> MemoryPartition:
    """A `partition_fn` for AOTAutograd that saves what makes the fastest step whose peak is at most `peak`.

    Inductor takes it as `torch._inductor.config.custom_partitioner_fn`; `fuses` is false for compilers that run every
    operator by itself. `resident_bytes` is what is allocated throughout; by default, on a GPU what is allocated when
    the graph is compiled, elsewhere the inputs of the graph. `communication` is what data parallelism takes more, and
    the state of the `optimizer`, which can be given in bytes, counts where it is not allocated yet. What
    `torch.utils.checkpoint` marks is planned like all else, or, with `checkpoints="respect"`, recomputed in every plan.
    """
    more = bytes_said(communication, "communication")
    respects = checked_checkpoints(checkpoints) == "respect"
    partition = MemoryPartition(
        MemoryBudget(peak),
        fuses,
        rates,
        resident_bytes,
        communication_bytes=more,
        respects_checkpoints=respects,
        optimizer_bytes=bytes_to_come(optimizer),
    )
    let_inductor_take(MemoryPartition)
    return partition


@final
@dataclass(frozen=True, slots=True)
class MemoryPartition:
    """A partitioner of joint graphs by a memory budget. Make one with `memory_partition`."""

    budget: MemoryBudget
    fuses: bool = True
    rates: Rates | None = None
    resident_bytes: int | None = None
    #: By how much an earlier plan was measured to be over its prediction.
    margin: int = 0
    #: What communication between ranks takes during a step.
    communication_bytes: int = 0
    #: Whether what `torch.utils.checkpoint` marks is recomputed in every plan.
    respects_checkpoints: bool = False
    #: What the optimizer's state will take that is not allocated yet.
    optimizer_bytes: int = 0
    #: How a graph is planned that is one of several of a step; None for a whole step.
    part: AsPart | None = None
    #: The plans of the graphs that were partitioned, in order.
    plans: Plans = field(default_factory=lambda: Plans(), compare=False, repr=False)

    def __call__(
        self, joint_module: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward."""
        before = Program.of(joint_module, forward_outputs=num_fwd_outputs)
        if not is_functionalized(before):
            raise RecomputeError(
                "the joint graph is not functionalized, so what is saved for backward cannot be chosen; let "
                "AOTAutograd functionalize it (disable_functionalization=False)"
            )

        def choose(prepared: GraphModule) -> Sequence[Node]:
            program = Program.of(prepared, forward_outputs=num_fwd_outputs)
            found = self.planned(program)
            self.plans.found.append(found)
            log.info("%s", found)
            return found.saved

        forward, backward = partition_saving(
            joint_module, joint_inputs, choose, num_fwd_outputs=num_fwd_outputs, **options
        )
        check_recomputed_reads(before, forward, backward)
        drop_forward_effects(backward)
        _delay_products(backward, self.plans.found[-1].simulated.delayed)
        return forward, backward

    @gc_paused()
    def planned(self, program: Program) -> JointMemoryPlan:
        """The plan for one joint graph."""
        device, dtype = _device_and_dtype(program)
        is_gpu = device.type == "cuda"
        rates = self.rates or measure_rates(device, dtype)
        step = JointStep(rates, self.fuses, LIBRARY_BYTES if is_gpu else 0)
        must_save = set(with_items(nodes_before_updates(program), set(program.index.nodes)))
        must_save.update(node for node in program.index.nodes if _must_be_saved(node))
        resident = self.resident_bytes
        if resident is None:
            resident = torch.cuda.memory_allocated(device) if is_gpu else _input_bytes(program)
        resident += self.communication_bytes + self.optimizer_bytes
        never_save = _checkpointed(program) if self.respects_checkpoints else ()
        planner = JointPlanner(program, step, must_save=must_save, never_save=never_save)
        self.plans.planner, self.plans.joint = planner, program.joint
        # A part is one of what the step takes if everything is saved.
        budget = self.budget.bytes(planner.plain.peak + resident)
        check_device_has(budget, device)
        if self.part is not None:
            return self._planned_part(self.part, planner, budget, resident)
        if budget <= resident:
            smallest = planner.smallest_peak + self.margin + resident
            raise BudgetError(
                f"parameters and all else that is allocated before the step take {shown_bytes(resident)}, and the "
                f"budget is {shown_bytes(budget)}; shard the model, or use a smaller dtype. The smallest peak is "
                f"{shown_bytes(smallest)} ({smallest} bytes)",
                smallest=smallest,
            )
        return planner.plan(budget - resident, margin=self.margin, resident=resident)

    def _planned_part(self, part: AsPart, planner: JointPlanner, budget: int, resident: int) -> JointMemoryPlan:
        """The plan that was made for the whole step; before there is one, that which takes the least memory."""
        if part.chosen is not None and planner.has(part.chosen):
            return planner.planned(part.chosen, planner.peak_of(part.chosen) + part.spare)
        joint = self.plans.joint
        assert joint is not None
        careful = menu_of(planner, joint, inputs=part.inputs).most_careful
        smallest = resident + max(careful.forward, careful.backward)
        # Of what the whole step takes a part cannot be known yet.
        if budget < smallest and not self.budget.is_relative:
            where = part.place and f" in {part.place}"
            raise BudgetError(
                f"a part of the step, the graph{where}, takes {shown_bytes(smallest)} ({smallest} bytes) by itself, "
                f"and the budget of the step is {shown_bytes(budget)}; allow more, or use smaller batches",
                smallest=smallest,
            )
        if self.budget.is_relative:
            return planner.planned(careful.chosen, max(planner.plain.peak, planner.peak_of(careful.chosen)))
        return planner.planned(careful.chosen, budget - resident, resident=resident)

    def uuid(self) -> str:
        """The key of this partitioner in caches of compiled code."""
        own = (self.part, self.margin, self.communication_bytes, self.respects_checkpoints, self.optimizer_bytes)
        fields = (self.budget, self.fuses, self.rates, self.resident_bytes, *own)
        return f"partita-peak-{sha256(repr(fields).encode()).hexdigest()}"


@final
@dataclass(frozen=True, slots=True)
class AsPart:
    """How a graph is planned whose step has several calls."""

    #: How many inputs it is called with.
    inputs: int
    #: What was chosen for it in a plan of the whole step, and how many bytes that leaves; None before there is one.
    chosen: tuple[int, ...] | None = None
    spare: int = 0
    #: Where in the model it is, for messages; no part of the key of compiled code.
    place: str = field(default="", compare=False, repr=False)


@final
class Plans:
    """The plans that a partitioner has made; copies of the partitioner, which Inductor makes, share them."""

    def __init__(self) -> None:
        self.found: list[JointMemoryPlan] = []
        #: What planned the last of them, and its graph.
        self.planner: JointPlanner | None = None
        self.joint: Joint | None = None

    def __deepcopy__(self, _: object) -> Plans:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()  # The partitioner is pickled into a cache key, which must not depend on what it has done.


def _delay_products(backward: GraphModule, delayed: Mapping[Node, Node]) -> None:
    """Runs products of the backward in the order that the plan counts with.

    Inductor reorders kernels only where its own estimate of the whole step gets lower (2.13), so it may not do so.
    A product stays where it is if something between reads it, or mutates anything, as FSDP's operators do.
    """
    if not delayed:
        return
    nodes = {node.name: node for node in backward.graph.nodes}
    program = Program.of(backward)
    mutating = {program.index.nodes[number] for number in program.calls.mutated}
    for early, late in delayed.items():
        one, two = nodes.get(early.name), nodes.get(late.name)
        # Names are those of the joint graph, unless a pass has replaced a node.
        if one is None or two is None or (one.target, two.target) != (early.target, late.target):
            continue
        between = one.next
        while between is not two and not (between.op == "output" or between in mutating or between in one.users):
            between = between.next
        if between is two and two not in one.users and not mutating & {one, two}:
            two.append(one)
    backward.recompile()


def _must_be_saved(node: Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def _checkpointed(program: Program) -> set[Node]:
    """What `torch.utils.checkpoint` marks for recomputation, without the results of each call, which others read."""
    joint = program.joint
    forward = set() if joint is None else set(joint.forward)
    returned = set() if joint is None else {*joint.forward_outputs}
    wanted = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    marked = [node for node in program.index.nodes if node in forward and node.meta.get("recompute") in wanted]
    call = {node: node.meta.get("ac_graph_id") for node in marked}
    return {
        node
        for node in marked
        if node not in returned and all(call.get(user) == call[node] for user in node.users if user in forward)
    }


def _device_and_dtype(program: Program) -> tuple[torch.device, torch.dtype]:
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.device, value.dtype
    return torch.device("cpu"), torch.float32


def _input_bytes(program: Program) -> int:
    values = [
        node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if "tangents" not in node.name
    ]
    return sum(int(hint_of(value.untyped_storage().nbytes())) for value in values if isinstance(value, Tensor))


def compile_to_fit(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    peak: str | int | float,
    inner: object,
    rates: Rates | None = None,
    communication: str | int = 0,
    optimizer: torch.optim.Optimizer | int = 0,
    checkpoints: Checkpoints = "replan",
    on_plan: Callable[[Any], object] | None = None,
    steps: Steps | None = None,
) -> Callable[..., Any]:
    """A compiled function like `gm` whose training step fits; the graph is compiled as a whole by `inner`.

    Graphs with the same `steps` share the budget. `on_plan` gets each `JointMemoryPlan`, and each `StepMemoryPlan` of
    steps that have several calls.
    """
    if inner not in ("inductor", "aot_eager"):
        raise OptionError(
            f"the option 'peak' plans for the compilers 'inductor' and 'aot_eager', not for {inner!r}; for another one "
            "pass partita.torch_compile.memory_partition(...) to AOTAutograd"
        )
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        log.info("the graph is compiled for inference: nothing is saved for backward, so no memory is planned")
        return _compiled_whole(gm, example_inputs, None, inner=str(inner))
    _check_can_be_planned(gm)
    partition = memory_partition(
        peak,
        fuses=inner == "inductor",
        rates=rates,
        communication=communication,
        optimizer=optimizer,
        checkpoints=checkpoints,
    )
    steps = Steps() if steps is None else steps
    place = PlaceInStep.of(gm)
    if steps.expects_several() or place.is_part:
        for other in steps.waiting():
            other.run_with_others()
        partition = replace(partition, part=AsPart(len(example_inputs), place=place.name))
    return FittedGraph(
        gm,
        example_inputs,
        partition,
        inner=str(inner),
        optimizer=optimizer,
        on_plan=on_plan,
        steps=steps,
        place=place,
    )


def _compiled_whole(
    gm: GraphModule, inputs: Sequence[Any], partition: MemoryPartition | None, *, inner: str
) -> Callable[..., Any]:
    with without_tracing_for_others(numbers_of(gm), gm):
        return compile_with_partitioner(gm, inputs, partition, inner=inner)


def _check_can_be_planned(gm: GraphModule) -> None:
    """Raises for a graph whose sizes are not known, or of which no code that is compiled whole has the backward."""
    if has_nested_tensors(gm.graph):
        raise BudgetError(
            "the graph has nested tensors, whose sizes are not known when a step is planned; compile without a peak, "
            "or pass padded tensors"
        )
    lost = lost_backward(gm)
    if lost is not None:
        raise BudgetError(
            f"the graph {lost}, and code that is compiled whole loses its backward (torch 2.13); let the function "
            "return a copy, or compile without a peak"
        )


@final
class FittedGraph:
    """A compiled graph whose peak is measured on a GPU in its second step; if it is over, it is planned once more.

    If its step has several calls, all of them are planned and measured together by its `Steps`.
    """

    #: cuBLAS workspaces of the threads of forward and backward.
    fixed_bytes = LIBRARY_BYTES

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        partition: MemoryPartition,
        *,
        inner: str,
        optimizer: torch.optim.Optimizer | int = 0,
        on_plan: Callable[[Any], object] | None = None,
        steps: Steps | None = None,
        place: PlaceInStep | None = None,
    ) -> None:
        devices = {x.device for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"}
        self.device = next(iter(devices)) if len(devices) == 1 else None
        # Compilers change the graph that they are given.
        self._gm = copied_graph(gm, inputs)
        # Traced values take no memory, unlike the inputs of this call.
        self._inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        self._sizes = {at: int(hint_of(size)) for at, size in enumerate(self._inputs) if isinstance(size, torch.SymInt)}
        self._inner, self._optimizer, self.on_plan = inner, optimizer, on_plan
        self._calls, self._has_run = 0, False
        self.partition = partition
        self._steps = Steps() if steps is None else steps
        self._menu: PartMenu | None = None
        #: With what it is compiled once more before its next call.
        self._wanted: MemoryPartition | None = None
        self._lock = RLock()
        self._function = self._compiled(gm, inputs, partition)
        self._number = self._steps.adopt(self)
        self._place = place
        self.name = f"graph {self._number}" + (self._place_name and f" in {self._place_name}")

    def __call__(self, *args: Any) -> Any:
        if not self._has_run and fake_mode_in(args) is not None:
            return self._function(*args)  # DDP's compiler calls the graph of a bucket to get fakes for the next one.
        self._has_run = True
        self._warn_of_larger(args)
        call = self._steps.begins(self._number, args)
        self._compile_as_wanted()
        # Whether there are other calls in its steps is known from the second step on.
        if self.device is not None and self._calls < 3 and (not self._calls or self._steps.runs_alone(self._number)):
            self._observe(self.device)
        results = self._function(*args)
        call.ended(results)
        return results

    def _compile_as_wanted(self) -> None:
        """Compiles once more if another plan is wanted; if that fails, the next call fails alike."""
        if self._wanted is None:
            return
        with self._lock:
            if (wanted := self._wanted) is not None:
                self._compile_again(wanted)
                if self._wanted is wanted:
                    self._wanted = None

    def _warn_of_larger(self, args: Sequence[Any]) -> None:
        """Says once if a graph of dynamic sizes is called with larger ones than it was planned for."""
        larger = [(size, args[at]) for at, size in self._sizes.items() if args[at] > size]
        if larger:
            log.warning(
                "%s was planned for a size of %d and is called with %d, which may take more than its budget; call it "
                "with the largest size first, or compile with dynamic=False, which plans for each size",
                *(self.name, *larger[0]),
            )
            self._sizes.clear()

    @property
    def budget(self) -> MemoryBudget:
        """What the whole step may take."""
        return self.partition.budget

    @property
    def communication_bytes(self) -> int:
        """What communication between ranks takes during a step."""
        return self.partition.communication_bytes

    @property
    def _place_name(self) -> str:
        return "" if self._place is None else self._place.name

    def model(self) -> nn.Module | None:
        """The outermost module that ran when it was compiled."""
        return None if self._place is None or self._place.model is None else self._place.model()

    def bytes_to_come(self) -> int:
        """The bytes of the optimizer's state that are not allocated yet."""
        return bytes_to_come(self._optimizer)

    def menu(self) -> PartMenu | None:
        """The ways to run it, that in which it runs now among them; None if it saves nothing for backward."""
        plans = self.partition.plans
        if self._menu is None and plans.planner is not None and plans.joint is not None:
            now = (plans.found[-1].chosen,)
            self._menu = menu_of(plans.planner, plans.joint, inputs=len(self._inputs), also=now)
        return self._menu

    def way(self) -> PartWay | None:
        """The way in which it runs now."""
        plans = self.partition.plans
        if plans.planner is None or plans.joint is None:
            return None
        return way_of(plans.planner, plans.found[-1].chosen, plans.joint, inputs=len(self._inputs))

    def plan_of(self, way: PartWay, spare: int) -> JointMemoryPlan:
        """What it saves in a way that leaves so many bytes of the budget."""
        planner = self.partition.plans.planner
        assert planner is not None
        return planner.planned(way.chosen, planner.peak_of(way.chosen) + spare)

    def run_so(self, way: PartWay, spare: int) -> None:
        """Compiles it once more before its next call, if it runs in another way."""
        self._wanted = None
        if way != self.way():
            part = AsPart(len(self._inputs), way.chosen, spare, self._place_name)
            self._wanted = replace(self.partition, part=part, margin=0, resident_bytes=None, plans=Plans())

    def run_alone(self) -> None:
        """Plans it by itself, if it was planned as a part of a step: its steps call nothing else."""
        if self.partition.part is not None:
            self._wanted = replace(self.partition, part=None, plans=Plans())

    def run_with_others(self) -> None:
        """Takes as little memory as it can until the whole step is known: its step has other graphs, too."""
        if self.partition.part is None and self.partition.plans.planner is not None:
            self._wanted = replace(
                self.partition, part=AsPart(len(self._inputs), place=self._place_name), plans=Plans()
            )

    def _compiled(self, gm: GraphModule, inputs: Sequence[Any], partition: MemoryPartition) -> Callable[..., Any]:
        function = _compiled_whole(gm, inputs, partition, inner=self._inner)
        if self.on_plan is not None:
            for found in partition.plans.found:
                self.on_plan(found)
        return function

    def _observe(self, device: torch.device) -> None:
        """Forgets the peak before the second step, since compilation may have raised it; compares before the third."""
        self._calls += 1
        if self._calls == 2:
            torch.cuda.reset_peak_memory_stats(device)
        if self._calls == 3:
            # What libraries allocate at the first step is part of the plan.
            resident = torch.cuda.memory_allocated(device) - LIBRARY_BYTES
            self.compare(torch.cuda.max_memory_allocated(device), max(resident, 0))

    def compare(self, measured: int, resident: int) -> None:
        """Plans and compiles once more if the measured peak of a step is over the budget.

        Where no plan fits then, it is the one with the smallest peak.
        `resident` is what is allocated between steps, gradients of an earlier step among it if they were kept. State
        that the optimizer has not allocated yet counts, too, unless it was given in bytes.
        """
        if not self.partition.plans.found:
            return  # No result of the graph has a gradient, so nothing was planned.
        plan, budget = self.partition.plans.found[-1], self.partition.budget
        to_come = 0 if isinstance(self._optimizer, int) else bytes_to_come(self._optimizer)
        asked = budget.bytes(0) - to_come
        if budget.is_relative:
            asked = plan.allowed_bytes + self.partition.communication_bytes + resident
        shown = [shown_bytes(number) for number in (measured, plan.peak_bytes + resident, asked)]
        log.info("the step takes %s at its peak, predicted %s, allowed %s", *shown)
        if measured <= asked:
            return
        log.warning("the step is over its budget by %s; it is planned once more", shown_bytes(measured - asked))
        margin = max(measured - plan.peak_bytes - resident, 0)
        # Communication is part of what was measured, so of the difference.
        again = MemoryPartition(
            budget,
            self.partition.fuses,
            self.partition.rates,
            resident,
            margin,
            respects_checkpoints=self.partition.respects_checkpoints,
            optimizer_bytes=to_come,
        )
        try:
            self._compile_again(again)
        except BudgetError as error:
            log.warning("no plan holds the budget: %s", error)
            if error.smallest is not None:
                self._compile_again(replace(again, budget=MemoryBudget(error.smallest)))

    def _compile_again(self, partition: MemoryPartition) -> None:
        with own_tracing_context(fake_mode_in(self._inputs)):
            self._function = self._compiled(copied_graph(self._gm, self._inputs), self._inputs, partition)
        self.partition = partition
