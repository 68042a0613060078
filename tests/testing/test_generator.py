"""The generator makes programs that run, that contain everything, and that are the same every time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from torch import Tensor
from torch.fx import GraphModule

from partita.errors import OptionError
from partita.testing import (
    Case,
    Features,
    Labels,
    Recipe,
    build,
    labelled_programs,
    programs,
    random_case,
    random_labels,
    random_recipe,
    recipes,
)
from partita.testing.generator.recipe import Input, Step
from partita.testing.generator.steps import STEPS

few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [random_case(seed) for seed in range(500)]


def outcome(case: Case) -> list[object]:
    """What a call returns and leaves behind, in a form that can be compared."""
    torch.manual_seed(0)
    grad = torch.is_grad_enabled()
    try:
        returned = case.run()
    finally:
        torch.set_grad_enabled(grad)
    left = [*case.graph_module.state_dict(keep_vars=True).values(), case.args, case.kwargs, torch.get_rng_state()]
    return [read(value) for value in leaves([returned, left])]


def read(value: object) -> object:
    if not isinstance(value, Tensor):
        return repr(value)
    return (str(value.dtype), value.stride(), value.requires_grad, value.is_inference(), value.tolist())


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def fingerprints(seeds: int) -> str:
    made = ((random_case(seed, features=Features(metadata=False)), seed) for seed in range(seeds))
    return "\n".join(f"{case.graph_module.code}{random_labels(case.graph_module.graph, seed)}" for case, seed in made)


def test_every_case_runs_and_repeats_itself(cases: list[Case]) -> None:
    for case in cases[:75]:
        case.graph_module.graph.lint()
        assert outcome(case.copy()) == outcome(case.copy()), case.origin


def test_cases_behave_as_models_do(cases: list[Case]) -> None:
    counts: Counter[str] = Counter()
    for case in cases:
        with torch.enable_grad():
            tensors = [value for value in leaves(case.copy().run()) if isinstance(value, Tensor)]
        assert not torch.is_autocast_enabled("cpu"), case.origin
        assert not torch.is_inference_mode_enabled(), case.origin
        counts[backward_of(tensors)] += 1
        counts["wild"] += is_wild(tensors)
    assert counts["works"] > len(cases) // 3
    assert counts["fails"] < len(cases) // 20
    assert counts["wild"] < len(cases) // 20


def is_wild(tensors: list[Tensor]) -> bool:
    try:
        return not all(value.isfinite().all() for value in tensors)
    except RuntimeError:  # A view whose base was written where autograd could not see it cannot even be read.
        return True


def backward_of(tensors: list[Tensor]) -> str:
    trained = [value for value in tensors if value.requires_grad]
    if not trained:
        return "missing"
    try:
        sum((value.float().sum() for value in trained), torch.zeros(())).backward()
    except RuntimeError:
        return "fails"
    return "works"


def test_everything_appears_in_one_case_of_twenty(cases: list[Case]) -> None:
    counts = Counter(trait for case in cases for trait in case.traits)
    assert {kind for kind in STEPS if kind not in counts} == set()
    assert {trait: count for trait, count in counts.items() if count < len(cases) // 20} == {}


def test_building_leaves_random_state_and_modes_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad():
        for seed in range(50):
            random_case(seed)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_metadata_changes_nothing_but_metadata() -> None:
    for seed in range(40):
        plain, rich = (build(replace(random_recipe(seed), metadata=style)) for style in ("none", "both"))
        assert str(plain.graph_module.graph) == str(rich.graph_module.graph)
        assert outcome(plain) == outcome(rich), plain.origin


def test_metadata_holds_fake_values() -> None:
    for seed in range(40):
        case = build(replace(random_recipe(seed), metadata="both"))
        if "metadata.both" not in case.traits:
            continue
        values = [node.meta[key] for node in case.graph_module.graph.nodes for key in node.meta]
        assert all(hasattr(value, "fake_mode") for value in leaves(values) if isinstance(value, Tensor)), case.origin


def test_sharing_and_persistence_survive_a_copy(cases: list[Case]) -> None:
    tied = [case for case in cases if {"weight", "tied.weight"} <= attributes(case)]
    viewed = [case for case in cases if {"cache", "cache_row"} <= attributes(case)]
    assert tied
    assert viewed
    for case in [*tied, *[case.copy() for case in tied]]:
        module = case.graph_module
        assert module.get_parameter("weight") is module.get_parameter("tied.weight")
    for case in [*viewed, *[case.copy() for case in viewed]]:
        module = case.graph_module
        assert "cache" not in module.state_dict()
        assert storage(module, "cache") == storage(module, "cache_row")


def attributes(case: Case) -> set[str]:
    return {str(node.target) for node in case.graph_module.graph.nodes if node.op == "get_attr"}


def storage(module: GraphModule, buffer: str) -> int:
    return module.get_buffer(buffer).untyped_storage().data_ptr()


def test_views_among_arguments_share_memory_but_no_history() -> None:
    whole, view = build(Recipe(inputs=(Input("plain"), Input("leaf_view", 1)))).args
    assert isinstance(whole, Tensor)
    assert isinstance(view, Tensor)
    assert whole.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert view.requires_grad
    assert view._base is None


@pytest.mark.parametrize(("partner", "taken"), [(0, True), (1, False)])
def test_rows_are_written_from_memory_that_is_not_written(partner: int, taken: bool) -> None:
    # Torch itself would not notice: of columns, which are not dense, it does not ask whether they overlap.
    columns, sines = Input("view", 2), Step("methods.unary", (0, 1, 0, 0))
    case = build(Recipe((Input("plain"), columns), (sines, Step("mutations.indexed", (1, 0, partner, 1)))))
    assert ("mutations.indexed" in case.traits) is taken


@pytest.mark.parametrize(("kind", "taken"), [("view", False), ("plain", True)])
def test_a_foreach_writes_to_tensors_that_are_apart(kind: str, taken: bool) -> None:
    # The view is the input before it, in another shape.
    case = build(Recipe((Input("plain"), Input(kind)), (Step("mutations.foreach", (0, 1, 1, 0)),)))
    assert ("mutations.foreach" in case.traits) is taken


@pytest.mark.slow  # By default, the laws compare what two processes generate.
def test_two_processes_agree() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_generator import fingerprints; print(fingerprints(20))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, __file__.rpartition("/")[0]]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == fingerprints(20).strip()


def test_a_case_prints_what_makes_it_again() -> None:
    case = random_case(7, features=Features(mutations=False))
    assert case.origin == "random_case(7, features=Features(mutations=False))"
    again = eval(case.origin, {"random_case": random_case, "Features": Features})
    assert again.graph_module.code == case.graph_module.code


@pytest.mark.parametrize(
    "family", ["mutations", "random", "grad", "autocast", "inference", "higher_order", "containers"]
)
def test_a_family_that_is_off_stays_out(family: str) -> None:
    for seed in range(15):
        case = random_case(seed, features=Features(**{family: False}))
        assert not [trait for trait in case.traits if trait.startswith(f"{family}.")]


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(OptionError, match="'colour'"):
        Features.only("mutations", "colour")


@few
@given(programs(max_nodes=20))
def test_drawn_programs_run(case: Case) -> None:
    outcome(case)


@few
@given(labelled_programs(max_nodes=20))
def test_labels_cover_the_graph_and_spare_its_ends(pair: tuple[Case, Labels]) -> None:
    case, labels = pair
    nodes = list(case.graph_module.graph.nodes)
    assert list(labels) == [node.name for node in nodes]
    assert all(labels[node.name] is None for node in nodes if node.op in ("placeholder", "output"))


def test_hypothesis_shrinks_to_the_step_that_matters() -> None:
    drawn = recipes(max_nodes=8, features=Features.only("mutations", "inputs", "names"))
    smallest = find(
        drawn, writes_an_item, settings=settings(few, max_examples=500, phases=[Phase.generate, Phase.shrink])
    )
    assert [step.kind for step in smallest.steps] == ["mutations.setitem"]
    assert len(smallest.inputs) == 1


def writes_an_item(recipe: Recipe) -> bool:
    return "mutations.setitem" in build(recipe).traits


def test_random_labels_are_of_many_kinds(cases: list[Case]) -> None:
    drawn = [random_labels(case.graph_module.graph, seed) for seed, case in enumerate(cases)]
    kinds = Counter(shape_of(labels) for labels in drawn)
    assert min(kinds["runs"], kinds["interleaved"], kinds["falling"]) > len(cases) // 20


def shape_of(labels: Labels) -> str:
    given_labels = [value for value in labels.values() if value is not None]
    runs = [value for value, before in zip(given_labels, [None, *given_labels], strict=False) if value != before]
    if len(runs) > len(set(runs)):
        return "interleaved"
    return "falling" if len(runs) > 1 and runs == sorted(runs, reverse=True) else "runs"
