"""The law for mixed plans: regions that are called, compiled, recomputed or wrapped in modes, all in one plan."""

from __future__ import annotations

from random import Random

from partita.backends import Backend, find_backend
from partita.backends.backend import tolerance_of
from partita.equivalence import compare
from partita.errors import PartitaError
from partita.plans import Plan, plan
from partita.program.program import Program
from partita.program.reordering import summation_tolerance
from partita.regions import Partition, Region
from partita.testing.generator.draft import Case
from partita.testing.laws.core import LawError
from partita.testing.laws.lowering import is_allowed, statistics_are_counted
from partita.testing.laws.mode_oracle import leaves_modes
from partita.testing.laws.recompute import random_keep, random_partition
from partita.treatments import Call, Lower, Mode, Recompute, Treatment


def check_mixed_law(case: Case, backend: str | Backend, seed: int) -> tuple[Plan, Program]:
    """Raises where the program differs once `random_mixture` is applied; else the plan and the result."""
    program, found = Program.of(case.graph_module), find_backend(backend)
    mixture, after = random_mixture(program, found, seed, wraps_modes=not leaves_modes(case))
    try:
        own = case.copy()
        tolerance = tolerance_of(found) | after.tolerance | summation_tolerance(program)
        comparison = compare(program, after, own.args, own.kwargs, tolerance=tolerance)
        counted = statistics_are_counted(mixture)
        allowed = [is_allowed(one, counted=counted, other_errors=True) for one in comparison.differences]
        assert all(allowed), str(comparison)
    except Exception as error:
        title = "a program with several treatments is equivalent to the original"
        raise LawError(f"{title}\n{case!r}\n{mixture}\n{type(error).__name__}: {error}") from error
    return mixture, after


def random_mixture(program: Program, backend: Backend, seed: int, *, wraps_modes: bool = True) -> tuple[Plan, Program]:
    """The plan of that number, and the program with it: a region that refuses its treatment is called instead.

    Operators put back the modes that they find, so that a program which leaves modes switched is not to be wrapped.
    """
    source = Random(seed)
    partition = random_partition(program, source, seed)
    treatments = {region.name: _treatment(program, region, backend, source) for region in partition}
    if not wraps_modes:
        treatments = {name: Call() if isinstance(one, Mode) else one for name, one in treatments.items()}
    for region in partition:
        try:
            plan(program, Partition(program, (region,)), treatments[region.name]).apply()
        except PartitaError:
            treatments[region.name] = Call()
    mixture = plan(program, partition, treatments)
    return mixture, mixture.apply()


def _treatment(program: Program, region: Region, backend: Backend, source: Random) -> Treatment:
    takes_all = not any(backend.refusal(node) for node in region.nodes)
    kinds: list[Treatment] = [Call(), Mode(), Recompute(random_keep(program, source))]
    return source.choice([*kinds, Lower(backend), Lower(backend)] if takes_all else kinds)
