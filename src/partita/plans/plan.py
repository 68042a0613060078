"""A plan: a partition of a program and a treatment for each region, decided before anything is done."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import or_
from typing import final
from weakref import ref

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita._torch.gc_pause import gc_paused
from partita.analysis.modes import AMBIENT
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import CallbackError, ModeError, OptionError, TreatmentError, listed
from partita.near_names import near_names
from partita.plans.compilations import Compilations, Failures
from partita.plans.diff import PlanDiff, plan_diff
from partita.plans.memory import CallerContexts, SavedMemory, caller_mode, saved_memory
from partita.plans.report import (
    DistinctBody,
    Excluded,
    Explanation,
    distinct_bodies,
    excluded,
    explanation,
    table,
    table_html,
)
from partita.plans.treatment import (
    Called,
    SharesBodies,
    Site,
    Treatment,
    allows_mixed_modes,
    annotation_suffices,
    call_treatment,
    is_treatment,
    marks_of,
    node_marks_of,
    puts_back_modes,
    tolerance_of,
    treated,
)
from partita.program.program import Program, origin_of, set_origin
from partita.program.saved_tensors import saved_tensors_of
from partita.regions import Partition, Region
from partita.regions.equal_bodies import shareable_bodies
from partita.regions.joint_forward import forward_alone
from partita.rewrite.inline import inline
from partita.rewrite.operator_calls import PLAIN_CALL, OperatorCall, call_through, calling_modules
from partita.rewrite.outline import CallModes, add_marks, marked, outlined
from partita.rewrite.state import MovedByPart, StateNaming, name_state

#: A policy reads a program and returns its regions.
Policy = Callable[[Program], Partition]

_WITHOUT_MODE = ("placeholder", "get_attr", "output")


@final
@dataclass(frozen=True, slots=True, repr=False)
class Plan(metaclass=PlainHelp):
    """What will be done to a program; print it, query it, then `apply` it.

    Example::

        plan = partita.plan(program, ByModule("0"), Lower("aot_eager"))
        print(plan.summary())  # how much is in regions, and why the rest is not
        print(plan.explain("relu"))  # why this node is where it is
        module = plan.apply().module()
        y = module(x)
        print(plan.compilations, plan.failures)  # what was compiled, and what runs eagerly instead

    `failures` and `compilations` grow as the result is called: which regions run eagerly, and why; which functions were
    compiled for which inputs.
    """

    #: The regions, and why other nodes are in none.
    partition: Partition
    #: One for each region, in the order of `partition`.
    treatments: tuple[Treatment, ...]
    #: Whether the result restores modes that the program leaves switched.
    puts_back_modes: bool = False
    #: Failed compilations of regions, which run eagerly; it grows as they are called.
    failures: Failures = field(default_factory=Failures, compare=False)
    #: The compiled functions that regions use: for which inputs, how long it took; it grows as they are called.
    compilations: Compilations = field(default_factory=Compilations, compare=False)

    def __post_init__(self) -> None:
        distinct = {id(treatment): treatment for treatment in self.treatments}.values()
        if len(self.treatments) != len(self.partition) or not all(map(is_treatment, distinct)):
            raise OptionError(
                f"a plan takes one treatment per region: {len(self.partition)} regions, treatments {self.treatments!r}"
            )
        if not all(map(allows_mixed_modes, distinct)):
            _check_modes(self.partition, self.treatments)

    @property
    def program(self) -> Program:
        """The program that the plan is about; it is never changed."""
        return self.partition.program

    @property
    def tolerance(self) -> Tolerance:
        """How far the treatments together may change numbers; `verify` reads it."""
        distinct = {id(treatment): treatment for treatment in self.treatments}.values()
        return reduce(or_, map(tolerance_of, distinct), EXACT)

    def apply(self, *, state_names: StateNaming = "split", share_bodies: bool = True) -> Program:
        """A new program in which every region is one call of the module that its treatment returned.

        Parameters and buffers are shared. `state_names="split"` names the state of modules that moved by where they
        went, as torch's `split_module` does; `"original"` keeps the names that checkpoints of the original use. An
        exported program can hold nothing but graphs: where a treatment returns another module, the result is the
        module of the exported program.

        Regions with equal bodies call one module, which has the names of all of them, with their own inputs; with
        `share_bodies=False` each has a module of its own.
        """
        return set_origin(self._applied(state_names, share_bodies=share_bodies), Application.of(self))

    def _applied(self, state_names: StateNaming, *, share_bodies: bool) -> Program:
        sites = self._sites()
        shared = _shared_bodies(self.partition, self.treatments, sites) if share_bodies else range(len(sites))
        final = AMBIENT if self.puts_back_modes else self.program.modes.final
        cut = outlined(self.partition, call_modes=CallModes.unknown(len(self.partition), final), shared=shared)
        module, moved = cut.graph_module, MovedByPart(cut.moved)
        results: list[Called] = []
        unexportable: dict[str, nn.Module] = {}
        for at, (name, body, site, treatment) in enumerate(
            zip(cut.names, cut.bodies, sites, self.treatments, strict=True)
        ):
            called = self._called(body, site, treatment) if shared[at] == at else results[shared[at]]
            if self.program.export is not None and not isinstance(called.module, GraphModule):
                unexportable[name] = _called_alone(called, treatment, site.region)
                called = Called(body)
            results.append(called)
            module._modules[name] = called.module
            moved.settle(name, body, called.module)
        called_by = {str(node.target): node.name for node in module.graph.find_nodes(op="call_module")}
        by_name = dict(zip(cut.names, results, strict=True))
        origins = {name: region.nodes for name, region in zip(cut.names, self.partition, strict=True)}
        call_through(module, self._operators(by_name), origins=origins)
        keys = self.program.state_keys.then(moved.settled)
        name_state(module, keys, naming=state_names)
        result = self.program.rewritten(module, state_keys=keys, tolerance=self.tolerance | cut.tolerance)
        inlined = {name for name, called in by_name.items() if called.inlined}
        calls = [node.name for node in module.graph.find_nodes(op="call_module") if node.target in inlined]
        result = inline(result, calls) if calls else result
        if not unexportable:
            return result
        # A region of sizes alone is never called: they are computed in the regions that read them.
        called_modules = {called_by[name]: module for name, module in unexportable.items() if name in called_by}
        return calling_modules(result, called_modules)

    def _called(self, body: GraphModule, site: Site, treatment: Treatment) -> Called:
        if not annotation_suffices(treatment):  # Otherwise the called module has the same effect.
            add_marks(body, marks_of(treatment, site.region))
        return treated(treatment, body, site)

    def _operators(self, called: Mapping[str, Called]) -> dict[str, OperatorCall]:
        """The operators that run bodies, by the name of the body; those of an exported program are all run by one."""
        is_exported = self.program.export is not None
        chosen = {name: one.through or PLAIN_CALL for name, one in called.items() if one.through or is_exported}
        return {name: call for name, call in chosen.items() if not called[name].inlined}

    def annotate(self) -> Program:
        """A new program without cuts whose nodes carry the marks of the treatments of their regions."""
        return marked(self.program, self.marks())

    def marks(self) -> dict[Node, dict[str, object]]:
        """The metadata for the nodes of all regions, and for nodes around them, by their treatments."""
        alone = forward_alone(self.partition)
        if alone is not None:
            # Values that only the backward of a joint graph reads are no results of a region.
            seen, original = alone
            return {original[node]: own for node, own in Plan(seen, self.treatments).marks().items()}
        marks: dict[Node, dict[str, object]] = {}
        # In the order in which the regions run: compilers compare numbers that treatments assign to regions.
        vertices = [vertex for vertex in self.partition.order if vertex < len(self.partition)]
        treated_regions = [(self.treatments[vertex], self.partition.regions[vertex]) for vertex in vertices]
        for treatment, region in treated_regions:
            for_all = marks_of(treatment, region)
            marks.update({node: dict(for_all) for node in region.nodes})
        done: dict[int, object] = {}
        for treatment, region in treated_regions:
            found = node_marks_of(treatment, region)
            # Regions may share a part of their marks.
            parts = reversed(found.maps) if isinstance(found, ChainMap) else [found]
            parts = [part for part in parts if id(part) not in done]
            done.update((id(part), part) for part in parts)
            for node, own in chain.from_iterable(part.items() for part in parts):
                marks.setdefault(node, {}).update(own)
        return marks

    def explain(self, node: Node | str) -> str:
        """Why this node is where it is, in words."""
        return str(self.explanation(node))

    def explanation(self, node: Node | str) -> Explanation:
        """Why this node is where it is, as data."""
        found = self.program.node(node) if isinstance(node, str) else node
        return explanation(self.partition, self.treatments, found)

    def saved_memory(self, *, under: CallerContexts = ()) -> SavedMemory:
        """What each region saves for backward, without its treatment and with it, and the whole program.

        `under` has the modes that the program is called under: `torch.autocast("cuda", torch.bfloat16)`, say, or
        several in a tuple, the outermost first. Without them it is called as it was captured.
        """
        saved = saved_tensors_of(self.program, caller_mode(under))
        return saved_memory(self.partition, self.treatments, saved)

    def excluded(self) -> tuple[Excluded, ...]:
        """The operators outside every region, by reason; each prints as a line."""
        return excluded(self.partition)

    def summary(self) -> str:
        """How many operators are in regions, and how many are excluded, by reason."""
        outside = self.excluded()
        inside, out = sum(map(self.partition.operator_count, self.partition)), sum(group.count for group in outside)
        regions = "1 region" if len(self.partition) == 1 else f"{len(self.partition)} regions"
        head = f"{inside} {'node' if inside == 1 else 'nodes'} in {regions}, {out} outside"
        return "\n".join([head, *map(str, outside)])

    def bodies(self) -> tuple[DistinctBody, ...]:
        """The distinct bodies, each with the regions that call it; each prints as a line.

        Names and values of weights do not count. `Lower` compiles a body once for all regions that have it, unless they
        are called with other kinds of inputs.
        """
        return distinct_bodies(self.partition)

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan changes: regions by name, their nodes and their treatments."""
        return plan_diff(self, other)

    def _sites(self) -> list[Site]:
        count, caller = len(self.partition), self.program.caller
        return [
            Site(region, self.program, place, count, caller, self.failures, self.compilations)
            for place, region in enumerate(self.partition)
        ]

    def __str__(self) -> str:
        return table(self.partition, self.treatments)

    def _repr_html_(self) -> str:
        return table_html(self.partition, self.treatments)

    def __repr__(self) -> str:
        return f"Plan of {self.program!r}: {self.summary()}"


@final
@dataclass(frozen=True, slots=True)
class Application:
    """The plan that made a program, by names, so that the program before it need not stay in memory."""

    program: ref[Program]
    regions: tuple[tuple[str, Hashable, tuple[str, ...]], ...]
    treatments: tuple[Treatment, ...]
    puts_back_modes: bool
    #: The nodes whose numbers are passed to regions.
    constants: tuple[str, ...]

    @staticmethod
    def of(plan: Plan) -> Application:
        named = tuple(
            (region.name, region.label, tuple(node.name for node in region.nodes)) for region in plan.partition
        )
        constants = tuple(node.name for node in plan.partition.constant_nodes())
        return Application(ref(plan.program), named, plan.treatments, plan.puts_back_modes, constants)

    def plan(self) -> Plan | None:
        """The same plan again; None if its program is gone."""
        program = self.program()
        if program is None:
            return None
        regions = [Region(name, tuple(map(program.node, nodes)), label=label) for name, label, nodes in self.regions]
        partition = Partition(program, regions).passing_numbers(map(program.node, self.constants))
        return Plan(partition, self.treatments, self.puts_back_modes)


def plan_applied_to_make(program: Program) -> Plan | None:
    """The plan whose result a program is; None if it is none, or if the program before it is gone."""
    origin = origin_of(program)
    return origin.plan() if isinstance(origin, Application) else None


@gc_paused()
def plan(
    program: Program | GraphModule | ExportedProgram,
    policy: Policy | Partition,
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment],
) -> Plan:
    """The plan with the regions of `policy` and their `treatment`: one for all, by region name, or by a function.

    Example::

        from partita.policies import BySize
        from partita.treatments import Call

        halves = BySize(parts=2)
        plan = partita.plan(program, halves, Call())
        plan = partita.plan(program, halves, {"part_0": Call(), "part_1": Lower("aot_eager")})
        plan = partita.plan(program, halves, lambda region: Call() if len(region) < 2 else Lower("aot_eager"))
    """
    program = program if isinstance(program, Program) else Program.of(program)
    if isinstance(policy, type):
        raise OptionError(f"{policy.__name__} is a class; pass an instance, for example {policy.__name__}(...)")
    if is_treatment(policy) and not callable(policy):
        raise OptionError(f"{policy!r} is a treatment; the policy comes first: plan(program, policy, treatment)")
    if not isinstance(policy, Partition) and not callable(policy):
        raise OptionError(f"a policy is called with a program and returns a Partition; {policy!r} is not callable")
    partition = _partition(program, policy)
    treatments = _treatments(partition, treatment)
    # None is the default of policies that can cut where the mode changes.
    if getattr(policy, "modes_apart", False) is None and _mixed_region(partition, treatments) is not None:
        partition = _partition(program, replace(policy, modes_apart=True))  # type: ignore[type-var]
        treatments = _treatments(partition, treatment)
    decisive = {id(one): one for one in treatments or (treatment,)}.values()
    puts_back = all(is_treatment(one) and puts_back_modes(one) for one in decisive) and _covers_modes(partition)
    return Plan(partition, treatments, puts_back)


def _partition(program: Program, policy: Policy | Partition) -> Partition:
    partition: object = policy if isinstance(policy, Partition) else policy(program)
    if not isinstance(partition, Partition):
        raise OptionError(f"a policy returns a Partition, not {type(partition).__name__}; policy: {policy!r}")
    if partition.program.graph_module is not program.graph_module:
        raise OptionError("this partition is of another program; make it from the program that you plan for")
    return partition


def _treatments(
    partition: Partition, treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment]
) -> tuple[Treatment, ...]:
    if is_treatment(treatment):
        return (treatment,) * len(partition)
    _check_names(partition, treatment)
    return tuple(_treatment_for(region, treatment) for region in partition)


def _check_names(partition: Partition, treatment: object) -> None:
    names = {region.name for region in partition}
    unknown = [name for name in treatment if name not in names] if isinstance(treatment, Mapping) else []
    # Another frame of the model may have the region.
    if unknown and partition.program.frame is None:
        raise OptionError(f"there is a treatment for {unknown[0]!r}, but no such region{_hint(partition, unknown[0])}")


def _hint(partition: Partition, unknown: object) -> str:
    """Which regions were meant, maybe: by their label, or by a similar name."""
    labelled = [region.name for region in partition if region.label == unknown]
    if labelled:
        return (
            f": it is the label of {listed(labelled)}, and a mapping is by region name; pass a function, such as "
            "lambda region: treatments[region.label]"
        )
    names = list(dict.fromkeys(region.name for region in partition))
    labels = list(dict.fromkeys(str(region.label) for region in partition if region.label is not None))
    near = near_names(str(unknown), names)
    if near or not names:
        return f"; did you mean {', '.join(map(repr, near))}?" if near else "; the policy found none"
    near_labels = near_names(str(unknown), labels) or labels
    return f"; there are {listed(names)}" + (f", labelled {listed(near_labels)}" if labels and labels != names else "")


def _treatment_for(
    region: Region, treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment]
) -> Treatment:
    chosen: object = treatment
    if isinstance(treatment, Mapping):
        chosen = treatment.get(region.name)
    elif not is_treatment(treatment) and callable(treatment) and not isinstance(treatment, type):
        try:
            chosen = treatment(region)
        except Exception as error:
            raise CallbackError(
                f"the function from regions to treatments raised {type(error).__name__} for region {region.name!r}: "
                f"{error}; nothing was changed"
            ) from error
    if not is_treatment(chosen):
        if isinstance(chosen, type):
            name = chosen.__name__
            raise OptionError(f"region {region.name!r} gets the class {name}, not a treatment; write {name}(...)")
        if isinstance(treatment, Mapping) and chosen is None:
            label = "" if region.label in (None, region.name) else f" (labelled {region.label!r})"
            raise OptionError(
                f"region {region.name!r}{label} has no treatment among {listed(list(map(str, treatment)))}; add one "
                "under this name, for example Call(), or pass a function from regions to treatments"
            )
        raise OptionError(f"region {region.name!r} has no treatment (got {chosen!r}); set one, for example Call()")
    return chosen


def _covers_modes(partition: Partition) -> bool:
    """Whether all nodes in modes of their own are in regions, so that treatments can restore the caller's modes."""
    modes, nodes = partition.program.modes, partition.program.index.nodes
    without = modes.toggles | partition.program.symbolic_scalars
    return all(
        owner >= 0 or number in without or modes.at(number) == AMBIENT or nodes[number].op in _WITHOUT_MODE
        for number, owner in enumerate(partition.owner)
    )


def _check_modes(partition: Partition, treatments: tuple[Treatment, ...]) -> None:
    """Raises where a treatment that allows one mode per region has a region of two."""
    found = _mixed_region(partition, treatments)
    if found is not None:
        modes, nodes = partition.program.modes, partition.program.index.nodes
        known, number = found
        owner = partition.owner[number]
        raise ModeError(
            f"region {partition.regions[owner].name!r} holds {nodes[known].name!r} under {modes.at(known)} and "
            f"{nodes[number].name!r} under {modes.at(number)}, but {treatments[owner]!r} takes one mode a region; cut "
            "it where the mode changes"
        )


def _mixed_region(partition: Partition, treatments: tuple[Treatment, ...]) -> tuple[int, int] | None:
    """Two nodes of one region in different modes, where the treatment of the region allows one mode."""
    modes, scalars = partition.program.modes, partition.program.symbolic_scalars
    first: dict[int, int] = {}
    for number, owner in enumerate(partition.owner):
        if owner < 0 or number in scalars or allows_mixed_modes(treatments[owner]):
            continue
        known = first.setdefault(owner, number)
        if modes.at(known) != modes.at(number):
            return known, number
    return None


def _shared_bodies(partition: Partition, treatments: Sequence[Treatment], sites: Sequence[Site]) -> Sequence[int]:
    """For each region the first one whose treated body it calls: the bodies are equal, and so are the results."""
    # The values of a shared body are those of one of its calls; of a joint graph, the storages of all are counted.
    if partition.program.joint is not None or not any(isinstance(treatment, SharesBodies) for treatment in treatments):
        return range(len(partition))
    first: dict[Hashable, list[int]] = {}
    found = list(range(len(partition)))
    for at, (body, treatment, site) in enumerate(zip(shareable_bodies(partition), treatments, sites, strict=True)):
        if not isinstance(treatment, SharesBodies):
            continue
        key = call_treatment(treatment.sharing_key, site, treatment, site.region)
        if key is None:
            continue
        like = first.setdefault((body, key), [])
        same = (known for known in like if _treats_alike(treatments[known], treatment, sites[known], site))
        found[at] = next(same, at)
        if found[at] == at:
            like.append(at)
    return found


def _treats_alike(one: Treatment, other: Treatment, site: Site, other_site: Site) -> bool:
    if one is not other and (type(one) is not type(other) or one != other):
        return False
    return annotation_suffices(one) or marks_of(one, site.region) == marks_of(other, other_site.region)


def _called_alone(called: Called, treatment: Treatment, region: Region) -> nn.Module:
    """The module, if no operator is to run it: operators of exported programs run only graphs."""
    if called.through is not None or called.inlined:
        raise TreatmentError(
            f"{treatment!r} returned {type(called.module).__name__} for region {region.name!r}, to be run by an "
            "operator or inlined, which needs a graph; return a torch.fx.GraphModule, or the module alone"
        )
    return called.module
