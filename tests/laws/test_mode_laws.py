"""The laws for modes: operators in the place of toggles mean the same, for any nest of modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.helpers.selecting import slow_but
from torch.fx import GraphModule, Node

from partita import Program, hops
from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, IS_GRAD_ENABLED
from partita.errors import ModeError, TreatmentError
from partita.testing import (
    EXPORTABLE,
    MODE_LAWS,
    Case,
    Input,
    LawError,
    Recipe,
    Step,
    build,
    check_export_laws,
    check_mode_laws,
    nests,
    random_nest,
)
from partita.testing.fuzz import fuzz
from partita.testing.generator.steps import NEST_STEPS
from partita.testing.laws.mode_oracle import ModeSubject, modes_seen, wrapped

#: Nests that once broke a law, by what was wrong.
ONCE_BROKEN = {
    "toggles by keyword": [("grad", (0, 0, 7, 0)), ("only", (2, 1, 0, 0)), ("leave", (0, 7, 0, 0))],
    "one cache flag for all devices": [
        *[("autocast", (0, 0, 0, 0)), ("autocast", (3, 0, 8, 0)), ("cross", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0))],
    ],
    "a cache flag set again": [
        *[("autocast", (0, 0, 8, 0)), ("autocast", (3, 0, 4, 0)), ("autocast", (0, 0, 8, 0)), ("weight", (0, 0, 0, 0))],
    ],
    "one body under two modes": [
        *[("autocast", (0, 14, 9, 0)), ("body", (0, 2, 0, 0)), ("body", (0, 2, 4, 0)), ("weight", (0, 0, 0, 0))],
    ],
    "a block with gradients entered without": [
        *[("grad", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0)), ("autocast", (0, 0, 0, 0)), ("toggle", (0, 0, 0, 0))],
        *[("weight", (0, 0, 0, 0)), ("leave", (0, 0, 0, 0))],
    ],
    "gradients off in a body": [
        *[("grad", (0, 0, 0, 0)), ("autocast", (0, 0, 0, 0)), ("only", (0, 13, 1, 0)), ("leave", (0, 0, 0, 0))],
    ],
    "gradients on in a body that is called without": [("grad", (0, 0, 0, 0)), ("body", (0, 3, 3, 0))],
    "a block that changes nothing for its caller": [
        *[("autocast", (0, 0, 0, 0)), ("border", (9, 0, 0, 0)), ("grad", (0, 5, 0, 0)), ("weight", (0, 0, 0, 0))],
    ],
    "a block in the caller's mode inside a run without gradients": [
        *[("queried", (0, 0, 0, 0)), ("autocast", (0, 0, 0, 0)), ("queried", (0, 0, 0, 15)), ("leave", (0, 0, 0, 0))],
        *[("autocast", (0, 10, 0, 0)), ("grad", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0))],
    ],
    "a module that is called in two modes": [
        *[("body", (0, 0, 0, 0)), ("modules.nested", (0, 0, 0, 0)), ("autocast", (0, 0, 0, 0))],
        ("modules.nested", (0, 0, 0, 0)),
    ],
    "a tuple that is taken apart behind a body with toggles": [
        *[("queried", (0, 0, 0, 0)), ("autocast", (0, 0, 0, 0)), ("higher_order.alike", (0, 0, 0, 0))],
        *[("queried", (0, 0, 0, 0)), ("again", (0, 0, 0, 0)), ("cross", (0, 0, 0, 0)), ("leave", (0, 0, 0, 0))],
        *[("modules.layer", (0, 0, 0, 0)), ("leave", (0, 0, 0, 0)), ("autocast", (0, 0, 7, 0)), ("only", (0, 1, 5, 0))],
    ],
    "autocast left on": [("autocast", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0)), ("forget", (0, 0, 0, 0))],
    "autocast left on by crossing": [
        *[("autocast", (0, 0, 0, 0)), ("autocast", (0, 2, 0, 0)), ("cross", (0, 0, 0, 0)), ("leave", (0, 0, 0, 0))],
    ],
}


@pytest.mark.parametrize("first", slow_but(range(0, 200, 10), 0))
def test_the_laws_hold_for_known_nests(first: int) -> None:
    for seed in range(first, first + 10):
        check_mode_laws(random_nest(seed, max_nodes=24))


def test_a_module_around_an_operator_computes_what_that_cannot_return() -> None:
    """The size of a block's result is compared with a number, and an operator outside of the block reads the answer."""
    assert check_mode_laws(random_nest(902885)) is None


@pytest.mark.parametrize("seed", slow_but(range(1000, 1012), 1000, 1001))
def test_the_laws_hold_for_large_nests(seed: int) -> None:
    check_mode_laws(random_nest(seed, max_nodes=96))


@pytest.mark.parametrize("name", ONCE_BROKEN)
def test_the_laws_hold_for_nests_that_broke_one(name: str) -> None:
    assert check_mode_laws(nest_of(ONCE_BROKEN[name])) is None


def nest_of(steps: list[tuple[str, Any]]) -> Case:
    """The program of these steps, which are those of nests unless they name another family."""
    named = tuple(Step(kind if "." in kind else f"nests.{kind}", picks) for kind, picks in steps)
    return build(Recipe((Input("leaf"),), named, Step("whole"), metadata="example_value", max_nodes=48))


@given(nests(max_nodes=24))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_laws_hold_for_random_nests(case: Case) -> None:
    check_mode_laws(case)


@pytest.mark.fuzz
@given(nests(max_nodes=80))
def test_the_laws_hold_for_many_nests(case: Case) -> None:
    check_mode_laws(case)


@pytest.mark.parametrize("seed", [0, 3, 7, 12])
def test_an_exported_nest_means_the_same(seed: int) -> None:
    case = random_nest(seed, max_nodes=24, features=EXPORTABLE)
    assert check_export_laws(case, dynamic=seed % 2 == 1) is None


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_many_exported_nests_mean_the_same(first: int) -> None:
    refused = [
        check_export_laws(random_nest(seed, features=EXPORTABLE), dynamic=seed % 2 == 1)
        for seed in range(first, first + 20)
    ]
    assert len([words for words in refused if words is None]) >= 15


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [random_nest(seed) for seed in range(100)]


def test_nests_hold_everything_and_are_deep(cases: list[Case]) -> None:
    counts = Counter(trait for case in cases for trait in case.traits)
    assert {kind: counts[kind] for kind in NEST_STEPS if counts[kind] < len(cases) // 10} == {}
    depths = Counter(map(depth_of, cases))
    assert sum(count for depth, count in depths.items() if depth >= 4) > len(cases) // 4
    assert max(depths) >= 7
    assert len(cases) // 4 < sum(has(case, ENTER_INFERENCE) for case in cases) < len(cases) * 3 // 4
    assert len(cases) // 4 < sum(has(case, IS_GRAD_ENABLED) for case in cases) < len(cases) * 3 // 4


def depth_of(case: Case) -> int:
    """The most autocast and inference blocks that are open at a time."""
    depth, deepest = 0, 0
    for node in case.graph_module.graph.nodes:
        depth += (node.target in (ENTER_AUTOCAST, ENTER_INFERENCE)) - (node.target in (EXIT_AUTOCAST, EXIT_INFERENCE))
        deepest = max(deepest, depth)
    return deepest


def has(case: Case, target: Callable[..., Any]) -> bool:
    return bool(case.graph_module.graph.find_nodes(op="call_function", target=target))


def test_making_nests_leaves_modes_and_random_state_alone(cases: list[Case]) -> None:
    assert cases
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not any(torch.is_autocast_enabled(device) for device in ("cpu", "xpu", "hpu"))
    assert torch.is_autocast_cache_enabled()


def test_a_nest_prints_what_makes_it_again() -> None:
    case = random_nest(3, max_nodes=20)
    assert case.origin == "random_nest(3, max_nodes=20)"
    assert random_nest(3, max_nodes=20).graph_module.code == case.graph_module.code


def test_a_nest_is_seldom_refused(cases: list[Case]) -> None:
    refused = [case for case in cases if is_refused(case)]
    assert 0 < len(refused) < len(cases) // 20


def is_refused(case: Case) -> bool:
    try:
        wrapped(Program.of(case.graph_module))
    except (ModeError, TreatmentError):
        return True
    return False


def test_the_oracle_writes_down_what_each_node_finds() -> None:
    case = nest_of([("autocast", (0, 0, 0, 0)), ("grad", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0))])
    seen = modes_seen(case, case.graph_module).modes["linear"]
    assert (seen.grad, seen.inference, seen.autocast[0]) == (False, False, ("cpu", True, torch.bfloat16))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def without_gradients(node: Node) -> None:
    node.args = (not node.args[0], *node.args[1:])


def of_another_type(node: Node) -> None:
    node.args = (node.args[0], torch.float16, *node.args[2:])


def without_cache(node: Node) -> None:
    node.args = (*node.args[:3], False, *node.args[4:])


@pytest.mark.parametrize(
    ("operator", "spoil", "law"),
    [
        (hops.wrap_with_set_grad_enabled, without_gradients, "every operator finds the modes that it found before"),
        (hops.wrap_with_set_grad_enabled, without_gradients, "inlining undoes wrapping"),
        (hops.wrap_with_set_grad_enabled, without_gradients, "no operator sets what is set already"),
        (hops.wrap_with_autocast, of_another_type, "a wrapped program is equivalent to the original"),
        (hops.wrap_with_autocast, of_another_type, "every operator finds the modes that it found before"),
        (hops.wrap_with_autocast, without_cache, "every operator finds the modes that it found before"),
    ],
)
def test_a_law_notices_an_operator_that_is_wrong(
    operator: Callable[..., Any], spoil: Callable[[Node], None], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ("weight", (0, 0, 0, 0))
    case = nest_of([("autocast", (0, 0, 0, 0)), layer, ("grad", (0, 0, 0, 0)), layer])
    program = Program.of(case.graph_module)
    spoiled = spoiled_by(wrapped(program), operator, spoil)
    monkeypatch.setattr("partita.testing.laws.modes.wrapped", lambda other: spoiled_by(wrapped(other), operator, spoil))
    with pytest.raises(AssertionError):
        MODE_LAWS[law](ModeSubject(case, program, spoiled))


def spoiled_by(program: Program, operator: Callable[..., Any], spoil: Callable[[Node], None]) -> Program:
    """The wrapped program with the first call of an operator, at any depth, changed."""
    for module in program.graph_module.modules():
        calls = module.graph.find_nodes(op="call_function", target=operator) if isinstance(module, GraphModule) else []
        if calls:
            spoil(calls[0])
            module.recompile()
            break
    return program.rewritten(program.graph_module)


def test_a_law_notices_toggles_that_are_left() -> None:
    case = nest_of([("autocast", (0, 0, 0, 0)), ("weight", (0, 0, 0, 0))])
    program = Program.of(case.graph_module)
    with pytest.raises(AssertionError, match="toggles are left"):
        MODE_LAWS["only operators switch modes"](ModeSubject(case, program, program))


def test_a_broken_law_names_the_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    def law(subject: ModeSubject) -> None:
        raise ZeroDivisionError(f"{len(subject.names)} nodes are too many")

    monkeypatch.setitem(MODE_LAWS, "nothing is right", law)
    with pytest.raises(LawError, match=r"nothing is right\n.*random_nest\(1, max_nodes=12\)(.|\n)*are too many"):
        check_mode_laws(random_nest(1, max_nodes=12))


def test_the_fuzzer_counts_nests() -> None:
    tally = fuzz(50_001, 3, modes=True)
    assert (tally.tried, tally.legal, tally.broken) == (3, 0, ())
    assert (tally + tally).tried == 6
