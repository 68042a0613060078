"""The laws: a legal cut is equivalent to the original, an illegal one is refused, and nothing depends on chance."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.core import listing
from tests.helpers.selecting import slow_but
from torch.fx import Graph, Node

from partita import Program, fingerprint, gather, inline, plan
from partita.errors import CallbackError, CycleError, PartitaError
from partita.policies import ByLabel
from partita.testing import (
    Case,
    Features,
    Labelling,
    Labels,
    captured_case,
    label,
    labelled_programs,
    random_case,
    random_labels,
)
from partita.testing.fuzz import fuzz
from partita.testing.generator.build import dump
from partita.testing.laws.core import check_laws
from partita.treatments import Call

#: Four cuts that are illegal, then legal ones that hold every trait that the generator knows.
SEEDS = (0, 2, 3, 4, 10, 14, 15, 31, 46, 49, 57, 71, 127, 128, 152, 161, 172, 224, 232, 266, 315)

#: Captures with symbolic sizes, in each of the three ways in which torch writes them down.
SYMBOLIC = (
    *product(("Attention", "Buffered", "Structured"), ("export_dynamic", "dynamo", "make_fx_symbolic")),
    ("Mixer", "export_dynamic"),
    ("Frozen", "dynamo"),
    ("Casting", "dynamo"),
)

captured = cache(captured_case)


@given(labelled_programs())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_laws_hold_for_random_programs(labelled: tuple[Case, Labels]) -> None:
    check_laws(*labelled)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_laws_hold_for_known_programs(seed: int) -> None:
    case = random_case(seed)
    check_laws(case, random_labels(case.graph_module.graph, seed))


@pytest.mark.parametrize(("model", "route"), SYMBOLIC, ids=[f"{model}-{route}" for model, route in SYMBOLIC])
@pytest.mark.parametrize("count", slow_but([2, 5], 5))
def test_the_laws_hold_for_captured_programs_in_blocks(model: str, route: str, count: int) -> None:
    case = captured(model, route)
    graph = case.graph_module.graph
    labels = operators_only(graph, label(graph, Labelling("blocks", count, salt=len(model) * count)))
    assert check_laws(case.copy(), labels), "blocks are legal"


def operators_only(graph: Graph, labels: Labels) -> Labels:
    """Attributes are read outside anyway."""
    return {node.name: labels[node.name] for node in graph.nodes if node.op != "get_attr"}


@pytest.mark.fuzz
@given(labelled_programs(max_nodes=60))
def test_the_laws_hold_for_many_programs(labelled: tuple[Case, Labels]) -> None:
    check_laws(*labelled)


@pytest.mark.fuzz
@given(
    capture=st.sampled_from(SYMBOLIC), style=st.sampled_from(["blocks", "levels", "threads", "interleaved"]),
    count=st.integers(1, 6), salt=st.integers(0, 10**6), gap=st.sampled_from((0, 3)),
)  # fmt: skip
@settings(max_examples=300)
def test_the_laws_hold_for_captured_programs_anyhow(
    capture: tuple[str, str], style: str, count: int, salt: int, gap: int
) -> None:
    case = captured(*capture)
    check_laws(case.copy(), label(case.graph_module.graph, Labelling(style, count, salt, gap)))


def test_the_known_programs_hold_legal_and_illegal_cuts() -> None:
    legal = 0
    for seed in SEEDS:
        case = random_case(seed)
        try:
            labelled(case, seed)(Program.of(case.graph_module))
            legal += 1
        except CycleError:
            continue
    assert 5 <= legal < len(SEEDS)


def labelled(case: Case, seed: int) -> ByLabel:
    labels = random_labels(case.graph_module.graph, seed)
    return ByLabel(lambda node: labels.get(node.name))


def outcome(seed: int) -> str:
    """Everything about a plan and its results that could depend on chance, as text."""
    case = random_case(seed, features=Features(metadata=False))
    program = Program.of(case.graph_module)
    try:
        made = plan(program, labelled(case, seed), Call())
    except PartitaError as error:
        return f"{type(error).__name__}: {error}"
    after = made.apply()
    parts = [after.module().code, *(listing(part) for part in after.module().children() if hasattr(part, "graph"))]
    results = [gather(made.partition), inline(after)]
    explained = [made.explain(node) for node in program.index.nodes]
    prints = [fingerprint(other) for other in (program, after, *results)]
    return "\n".join([str(made), *explained, *parts, *map(listing, results), *prints, *after.module().state_dict()])


def outcomes() -> str:
    return "\n\n".join(map(outcome, SEEDS[:12]))


def test_everything_is_the_same_in_another_process() -> None:
    command = "from tests.laws.test_laws import outcomes; print(outcomes())"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(["src", "."])},
    )  # fmt: skip
    assert found.stdout.strip().splitlines() == outcomes().strip().splitlines()


def test_everything_is_the_same_the_second_time() -> None:
    assert outcomes() == outcomes()


@pytest.mark.parametrize("seed", range(12))
def test_an_error_halfway_leaves_program_and_modes_as_they_were(seed: int) -> None:
    case = random_case(seed)
    program = Program.of(case.graph_module)
    before, state = dump(case.graph_module), torch.get_rng_state()
    asked: list[Node] = []

    def fails_late(node: Node) -> int:
        asked.append(node)
        if len(asked) == len(program.operators()):
            raise ZeroDivisionError("late")
        return len(asked) % 2

    with pytest.raises((CallbackError, CycleError), match=r"nothing was changed|cycle"):
        plan(program, ByLabel(fails_late), Call())
    with pytest.raises(PartitaError):
        plan(program, ByLabel(lambda node: 0), Failing()).apply()
    assert dump(case.graph_module) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


class Failing:
    """A treatment that raises."""

    def treat(self, body: object) -> object:
        raise ZeroDivisionError("no")


def test_the_fuzzer_counts_what_it_tried() -> None:
    tally = fuzz(50_000, 4)
    assert (tally.tried, tally.broken) == (4, ())
    assert (tally + tally).tried == 8
