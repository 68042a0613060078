"""A plan: a partition of a program, a treatment for each region, and the reasons; decided, and nothing done yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import final

from torch.fx import Node

from partita.errors import ModeError, OptionError
from partita.graphs.program import Program
from partita.graphs.tolerance import EXACT, Tolerance
from partita.plans.explaining import explanation
from partita.plans.table import table
from partita.plans.treatment import Treatment
from partita.regions import Partition, Region
from partita.rewrite.marking import add_marks, marked
from partita.rewrite.outline import outline
from partita.rewrite.state_keys import StateNaming, name_state
from partita.rewrite.unique_names import unique_names

__all__ = ["Plan", "Policy", "plan"]

#: A policy reads a program and names its regions.
Policy = Callable[[Program], Partition]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What will be done to a program; print it, ask it, then `apply` it."""

    partition: Partition
    treatments: tuple[Treatment, ...]

    def __post_init__(self) -> None:
        for region, treatment in zip(self.partition, self.treatments, strict=True):
            if not treatment.mixes_modes:
                _check_one_mode(self.program, region, treatment)

    @property
    def program(self) -> Program:
        """The program that the plan is about; it stays as it is."""
        return self.partition.program

    @property
    def tolerance(self) -> Tolerance:
        """How far the treatments together may change numbers; `verify` reads it."""
        return reduce(or_, (treatment.tolerance for treatment in self.treatments), EXACT)

    def apply(self, *, state_names: StateNaming = "split") -> Program:
        """A new program in which every region is one call of what its treatment gave.

        Parameters and buffers are shared. `state_names="split"` names the state of modules that moved by where they
        went, as torch's `split_module` does; `"original"` keeps the names that checkpoints of the original use.
        """
        names = unique_names([region.name for region in self.partition], self.program.graph_module)
        outlined = outline(self.partition, names=names)
        module = outlined.graph_module
        for name, body, region, treatment in zip(names, outlined.bodies, self.partition, self.treatments, strict=True):
            add_marks(body, treatment.marks(region))
            module._modules[name] = treatment.treat(body)
        keys = self.program.state_keys.then(outlined.moved)
        name_state(module, keys, naming=state_names)
        tolerance = self.program.tolerance | self.tolerance | Tolerance(reordered=outlined.reordered)
        return Program(module, pure=self.program.pure, state_keys=keys, tolerance=tolerance)

    def annotate(self) -> Program:
        """A new program, cut nowhere, whose nodes carry the marks that the treatments give their regions."""
        marks = {
            node: treatment.marks(region)
            for region, treatment in zip(self.partition, self.treatments, strict=True)
            for node in region.nodes
        }
        return marked(self.program, marks)

    def explain(self, node: Node | str) -> str:
        """Why this node is where it is."""
        found = self.program.node(node) if isinstance(node, str) else node
        return explanation(self.partition, self.treatments, found)

    def __str__(self) -> str:
        return table(self.partition, self.treatments)

    def __repr__(self) -> str:
        return f"Plan({len(self.partition)} regions of {self.program!r})"


def plan(
    program: Program,
    policy: Policy | Partition,
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment],
) -> Plan:
    """The plan that gives each region of `policy` its `treatment`: one for all, by region name, or by a function."""
    partition = policy if isinstance(policy, Partition) else policy(program)
    if not isinstance(partition, Partition):
        raise OptionError(f"a policy gives a Partition, not {type(partition).__name__}; policy: {policy!r}")
    if partition.program is not program:
        raise OptionError("this partition is of another program; make it from the program that you plan for")
    return Plan(partition, tuple(_treatment_for(region, treatment) for region in partition))


def _treatment_for(
    region: Region, treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment]
) -> Treatment:
    if isinstance(treatment, Treatment):
        return treatment
    if isinstance(treatment, Mapping):
        chosen = treatment.get(region.name)
    else:
        chosen = treatment(region) if callable(treatment) else treatment
    if not isinstance(chosen, Treatment):
        raise OptionError(f"region {region.name!r} has no treatment (got {chosen!r}); give it one, for example Call()")
    return chosen


def _check_one_mode(program: Program, region: Region, treatment: Treatment) -> None:
    index, modes = program.index, program.modes
    found = {modes.at(index.number[node]): node for node in region.nodes if index.number[node] not in modes.toggles}
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ModeError(
            f"region {region.name!r} holds {first.name!r} under {one} and {second.name!r} under {other}, but "
            f"{treatment!r} takes one mode a region; cut the region where the mode changes"
        )
