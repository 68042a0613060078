"""Recomputation over generated and captured programs: whatever is recomputed and whatever is kept, nothing differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.helpers.selecting import slow_but

import partita
from partita import Program
from partita.policies import BySize
from partita.testing import ALL, CAPTURES, LawError, captured_case, random_case, random_nest
from partita.testing.fuzz import fuzz
from partita.testing.generator.build import random_crossing
from partita.testing.laws import treatments as recompute_laws
from partita.testing.laws.mode_oracle import leaves_modes
from partita.testing.laws.treatments import check_recompute_laws
from partita.treatments import KeepEverything, KeepNothing, Recompute

KNOWN = replace(ALL, unknown=False, hooks=False)


#: Among the programs from here on, those with a region that uses its own random number generator.
REFUSED = {311, 327}


@pytest.mark.parametrize("seed", slow_but(range(300, 330), *range(300, 312), 327))
def test_generated_programs_are_the_same_once_recomputed(seed: int) -> None:
    refusal = check_recompute_laws(random_case(seed, features=KNOWN), seed)
    assert (refusal is not None) is (seed in REFUSED), refusal


# Kept modules that write, weights that autocast has cast before, views that may not be asked, items of containers that
# come in as they are, writes to what the backward does not need, one tensor given twice, a foreach on a view.
@pytest.mark.parametrize(
    "seed",
    [
        19,
        67,
        131,
        147,
        20061,
        20096,
        20187,
        20977,
        20994,
        21063,
        21746,
        40590,
        103286,
        103587,
        103773,
        106481,
        300249,
        808778,
    ],
)
def test_programs_that_once_differed_are_the_same(seed: int) -> None:
    assert check_recompute_laws(random_case(seed), seed) is None


def test_a_view_that_autograd_takes_for_a_leaf_may_be_mutated_in_a_recomputed_region() -> None:
    assert check_recompute_laws(random_crossing(910031), 910031) is None


def test_nests_of_modes_are_the_same_once_recomputed() -> None:
    nests = {seed: random_nest(seed, features=KNOWN) for seed in range(12)}
    closed = {seed: nest for seed, nest in nests.items() if not leaves_modes(nest)}
    assert len(closed) > 2
    assert [check_recompute_laws(nest, seed) for seed, nest in closed.items()].count(None) > 2


def test_the_fuzzer_counts_what_was_recomputed() -> None:
    tally = fuzz(60_000, 10, recompute="eager")
    assert (tally.tried, tally.broken) == (10, ())
    assert tally.legal + len(tally.refused) == 10
    assert tally.legal > 5


def test_a_broken_law_tells_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_program(program: Program, seed: int) -> Program:
        return Program.of(torch.fx.symbolic_trace(lambda x: x * 2))

    case = next(case for case in map(random_case, range(100)) if len(case.args) == 1 and not case.kwargs)
    monkeypatch.setattr(recompute_laws, "recomputed", other_program)
    with pytest.raises(LawError, match=r"is equivalent to the original(.|\n)*random_case\(\d+\)"):
        check_recompute_laws(case, 1)


SOME = [("Attention", "export_dynamic"), ("Buffered", "dynamo"), ("Frozen", "export"), ("Structured", "symbolic_trace")]


@pytest.mark.parametrize("capture", SOME, ids="-".join)
def test_captured_programs_are_the_same(capture: tuple[str, str]) -> None:
    _check_captured(capture)


@pytest.mark.fuzz
@pytest.mark.parametrize("capture", CAPTURES, ids="-".join)
def test_all_captured_programs_are_the_same(capture: tuple[str, str]) -> None:
    _check_captured(capture)


def _check_captured(capture: tuple[str, str]) -> None:
    for keep in (KeepNothing(), KeepEverything()):
        for parts in (1, 3):
            case = captured_case(*capture)
            program = Program.of(case.graph_module)
            after = partita.plan(program, BySize(parts=parts), Recompute(keep)).apply()
            partita.verify(program, after, case.args, case.kwargs)
