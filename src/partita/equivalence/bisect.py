"""Finds the region of a plan, and the operators in it, because of which the result differs from the program."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from torch.fx import Node

from partita._plain_help import PlainHelp
from partita.analysis.tolerance import Tolerance
from partita.equivalence.compare import compare
from partita.equivalence.differences import Comparison, Difference
from partita.equivalence.reproduction import Asked, write_reproduction
from partita.errors import OptionError, PartitaError
from partita.plans import Plan
from partita.plans.compilations import Failures, logged_once
from partita.plans.report import called_name
from partita.plans.treatment import Treatment
from partita.policies.by_module import calls_around
from partita.program.program import Program
from partita.regions import Region
from partita.solvers.smallest_failing import failing_element, smallest_failing, smallest_failing_run
from partita.treatments.basic import Call

#: How many of the operators to blame are printed.
_SHOWN = 8

#: Nothing differs; the program differs from itself; the cut differs without any treatment; one region differs by
#: itself; only several together do.
Blame: TypeAlias = Literal["nothing", "program", "cut", "region", "combination"]


@final
@dataclass(frozen=True, slots=True)
class Place(metaclass=PlainHelp):
    """An operator and where it comes from; texts are empty where the tracer, or the file, recorded nothing."""

    node: str
    #: The operator, as the graph calls it.
    calls: str
    #: The path of the innermost module, and its class.
    module: str
    module_class: str
    #: The innermost line outside of torch, as file:line.
    source: str

    def __str__(self) -> str:
        words = [f"{self.node}: {self.calls}"]
        words += [f"in {self.module} ({self.module_class})"] if self.module else []
        words += [f"at {self.source}"] if self.source else []
        return " ".join(words)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Bisection(metaclass=PlainHelp):
    """What makes the result of a plan differ: regions of the plan, and the operators of the region that suffice."""

    #: "region"; "combination" if only several regions together differ; "cut" if the region differs without its
    #: treatment; "program" if the program differs from itself; "nothing".
    blame: Blame
    #: The region to blame, or those that differ together.
    regions: tuple[Region, ...]
    #: The shortest run of operators of the region that was found to differ; empty if no single region is to blame.
    nodes: tuple[Node, ...]
    #: What differs if nothing but these operators, or these regions, is treated.
    comparison: Comparison
    #: How many programs were compared with the original.
    runs: int
    #: The plan that treats nothing else.
    plan: Plan | None
    _asked: Asked | None = None

    def __str__(self) -> str:
        places = [str(place) for place in self.places[:_SHOWN]]
        more = len(self.nodes) - len(places)
        lines = [*places, *([f"and {more} more"] if more else []), *str(self.comparison).splitlines()]
        return "\n".join([self._found(), *(f"  {line}" for line in lines)])

    def __repr__(self) -> str:
        return f"Bisection({self._found()})"

    def _found(self) -> str:
        count = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        runs = f"found in {count}"
        names = ", ".join(repr(region.name) for region in self.regions)
        match self.blame:
            case "nothing":
                return f"nothing differs ({count})"
            case "program":
                return f"the program differs from itself when it is called twice, so no region is to blame ({runs})"
            case "combination":
                return f"regions {names} differ together, and no part of them does ({runs})"
        (region,) = self.regions
        treatment = "although it is not treated" if self.blame == "cut" else f"treated by {self.plan_treatment!r}"
        return f"region {names} differs, {treatment}: {_run_of(self.nodes, region)} suffice ({runs})"

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the operators to blame come from: what each calls, its module, and the line of the model's source."""
        return () if self.plan is None else tuple(_place_of(node, self.plan.program) for node in self.nodes)

    @property
    def plan_treatment(self) -> Treatment | None:
        """The treatment of the region to blame."""
        return self.plan.treatments[0] if self.plan is not None and self.plan.treatments else None

    def reproduce(self, folder: str | os.PathLike[str]) -> str:
        """Writes `reproduce.py` and the inputs of the operators to blame into a folder; the path of the script.

        The script runs the operators eagerly and as the treatment did, in the call that differs, and prints what
        differs, without Partita. It is run before it is written; where it shows nothing, `OptionError` says so.
        """
        if self.plan is None or self._asked is None or not self.nodes:
            raise OptionError(f"{self._found()}: there is no single region to reproduce")
        return write_reproduction(self.plan, self._asked, folder, summary=str(self), differs=self.comparison)


def _run_of(nodes: Sequence[Node], region: Region) -> str:
    count = f"{len(nodes)} of its {len(region)} nodes"
    return f"{count}, {nodes[0].name!r}" + (f" to {nodes[-1].name!r}," if len(nodes) > 1 else ",")


def bisect(
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    isolate: bool = False,
    tolerance: Tolerance | None = None,
    gradients: bool = True,
    second_call: bool = True,
    no_grad_call: bool = True,
    other_shapes: bool = True,
) -> Bisection:
    """The region because of which the result of `plan` differs, and the operators in it, found by halving.

    Example::

        found = partita.bisect(plan, (x,))
        print(found.blame)  # "nothing" here; "region" where one is wrong
        if found.blame == "region":
            print(found.regions[0].name, found.nodes)
            found.reproduce("folder")  # a script that shows the fault, without Partita

    Parts of the plan are applied and compared with the program as `compare` does, which has the same options. An
    exception of a treatment counts as a difference; where nothing else differs, so does a failed compilation. With
    `isolate` every part runs in a process of its own, and one that crashes the process counts, too.
    """
    compared = partial(
        compare,
        args=args,
        kwargs=kwargs,
        tolerance=tolerance,
        gradients=gradients,
        second_call=second_call,
        no_grad_call=no_grad_call,
        other_shapes=other_shapes,
    )
    trials = Trials(plan, compared, isolate=isolate)
    with logged_once():
        found = _bisected(plan, trials)
    return replace(found, _asked=Asked(args, kwargs or {}, gradients, tolerance))


def _bisected(plan: Plan, trials: Trials) -> Bisection:
    found = region_to_blame(plan, trials, together=True)
    if found.blame not in ("region", "cut") or found.plan is None:
        return found
    inner, differs = _narrowed(found.plan, trials) or (found.plan, found.comparison)
    return replace(found, nodes=inner.partition.regions[0].nodes, comparison=differs, runs=trials.runs, plan=inner)


def region_to_blame(plan: Plan, trials: Trials, *, together: bool = False) -> Bisection:
    """The region because of which the result of a plan differs; its operators are not looked for.

    Where no region differs by itself, a smallest set of regions that differ `together` takes many more runs; without
    that it is all of them.
    """
    whole = trials.of(plan)
    if whole.equal:
        return Bisection("nothing", (), (), whole, trials.runs, None)
    itself = trials.of_program()
    if not itself.equal:
        return Bisection("program", (), (), itself, trials.runs, None)
    order = [vertex for vertex in plan.partition.order if vertex < len(plan.partition)]
    parts: dict[tuple[int, ...], Comparison] = {tuple(range(len(order))): whole}

    def fails(places: Sequence[int]) -> bool:
        if tuple(places) not in parts:
            parts[tuple(places)] = trials.of(_part(plan, [order[place] for place in places]))
        return not parts[tuple(places)].equal

    if together:
        chosen = smallest_failing(len(order), fails)
    else:
        alone = failing_element(len(order), fails)
        chosen = list(range(len(order))) if alone is None else [alone]
    part = _part(plan, [order[place] for place in chosen])
    differs = parts[tuple(chosen)]
    if len(chosen) > 1:
        return Bisection("combination", part.partition.regions, (), differs, trials.runs, part)
    cut = replace(part, treatments=(Call(),))
    untreated = trials.of(cut)
    if not untreated.equal:
        return Bisection("cut", part.partition.regions, (), untreated, trials.runs, cut)
    return Bisection("region", part.partition.regions, (), differs, trials.runs, part)


def _narrowed(part: Plan, trials: Trials) -> tuple[Plan, Comparison] | None:
    """The plan of the shortest run of operators of its one region that differs; None if it is the whole region."""
    (region,) = part.partition
    found: dict[tuple[int, int], tuple[Plan, Comparison]] = {}

    def fails(start: int, end: int) -> bool:
        try:
            inner = _within(part, start, end)
        except PartitaError:  # Not every run can be cut out alone.
            return False
        found[start, end] = inner, trials.of(inner)
        return not found[start, end][1].equal

    return found.get(smallest_failing_run(len(region), fails))


def _part(plan: Plan, chosen: Sequence[int]) -> Plan:
    """The plan of some regions; what is in the others is not cut."""
    kept = sorted(chosen)
    partition = plan.partition.of_other_regions(plan.partition.regions[at] for at in kept)
    return Plan(partition, tuple(plan.treatments[at] for at in kept), plan.puts_back_modes)


def _within(part: Plan, start: int, end: int) -> Plan:
    """The plan of a run of the nodes of its one region. In graph order a run of a region is one, too."""
    (region,) = part.partition
    inner = replace(region, nodes=region.nodes[start:end], program=None)
    return Plan(part.partition.of_other_regions([inner]), part.treatments, part.puts_back_modes)


#: Compares two programs.
Compared: TypeAlias = Callable[[Program, Program], Comparison]


class Trials:
    """Compares the results of plans with the program, and counts.

    What differs in the whole plan decides what is looked for: other kinds of differences, such as the exception of a
    treatment that does not take a part of its region, are not the fault that is searched.
    """

    def __init__(self, plan: Plan, compared: Compared, *, isolate: bool = False) -> None:
        self._program, self._compared, self._isolate = plan.program, compared, isolate
        self.runs = 0
        self._wanted: set[str] | None = None

    def of_program(self) -> Comparison:
        return self._run(lambda: self._compared(self._program, self._program))

    def of(self, plan: Plan) -> Comparison:
        """What differs in the result of a plan."""
        fresh = Plan(plan.partition, plan.treatments, plan.puts_back_modes)
        found = self._run(lambda: self._of(fresh))
        if self._wanted is None:
            self._wanted = set(map(_kind, found.differences))
        return replace(found, differences=tuple(one for one in found.differences if _kind(one) in self._wanted))

    def _of(self, plan: Plan) -> Comparison:
        try:
            found = self._compared(self._program, plan.apply())
        except Exception as error:
            found = Comparison((Difference("exception", _TREATMENT, f"{type(error).__name__}: {error}"),), calls=1)
        failed = _failed(plan.failures) if found.equal else ()
        return replace(found, differences=(*found.differences, *failed))

    def _run(self, trial: Callable[[], Comparison]) -> Comparison:
        self.runs += 1
        return _isolated(trial) if self._isolate else trial()


_FAILED = "compilation"


def _kind(difference: Difference) -> str:
    """What makes two differences the same fault: their kind, and the type of an exception."""
    is_raised = difference.kind == "exception" and difference.where == _TREATMENT
    return f"{difference.kind} {difference.detail.partition(':')[0]}" if is_raised else difference.kind


_TREATMENT = "the treatment"


def _failed(failures: Failures) -> tuple[Difference, ...]:
    return tuple(
        Difference(_FAILED, f"region {failure.region!r}", f"{failure.backend} failed: {failure.reason}")
        for failure in failures
    )


def _isolated(trial: Callable[[], Comparison]) -> Comparison:
    """What a trial finds in a copy of this process; a copy that dies is a difference."""
    if "fork" not in torch.multiprocessing.get_all_start_methods():
        raise OptionError(f"isolate=True copies the process, which {sys.platform} cannot; leave it out")
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(trial, sender))
    process.start()
    sender.close()
    try:
        found: Comparison | Exception = receiver.recv()
    except EOFError:
        process.join()
        how = f"exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            how = signal.Signals(-process.exitcode).name
        return Comparison((Difference("crash", "the process", how),), calls=1)
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _answer(trial: Callable[[], Comparison], sender: Connection) -> None:
    torch.set_num_threads(1)  # Threads of the parent are not there.
    try:
        sender.send(trial())
    except Exception as error:
        sender.send(error)
    sender.close()


def _place_of(node: Node, program: Program) -> Place:
    """Where a node of a program comes from."""
    calls = calls_around(node, program.graph_module)
    kind: Any = calls[-1].type if calls else ""
    return Place(
        node=node.name,
        calls=called_name(node),
        module=calls[-1].path if calls else "",
        module_class=str(getattr(kind, "__name__", kind)).rpartition(".")[2],
        source=_source(str(node.meta.get("stack_trace") or "")),
    )


def _source(trace: str) -> str:
    frames: list[tuple[str, str]] = _FRAME.findall(trace)
    own = [frame for frame in frames if _TORCH not in Path(frame[0]).parents] or frames
    return ":".join(own[-1]) if own else ""


_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)
_TORCH = Path(torch.__file__).parent
