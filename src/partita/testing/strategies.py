"""Strategies of hypothesis: programs, and regions over them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from partita.testing.captured import CAPTURES, captured_case
from partita.testing.generator.build import NEST_KINDS, OUTPUT_KINDS, PLAIN_OUTPUT_KINDS, build
from partita.testing.generator.draft import Case
from partita.testing.generator.inputs import INPUT_KINDS, PLAIN_INPUT_KINDS
from partita.testing.generator.recipe import ALL, LARGEST_PICK, METADATA, Features, Input, Picks, Recipe, Step
from partita.testing.generator.regions import LABEL_STYLES, Labelling, Labels, label
from partita.testing.generator.steps import families_of, kinds_in

_MOST_INPUTS = 5


def programs(*, max_nodes: int = 30, features: Features = ALL) -> SearchStrategy[Case]:
    """Programs of up to about `max_nodes` nodes that run on their arguments."""
    return recipes(max_nodes=max_nodes, features=features).map(build)


def labelled_programs(*, max_nodes: int = 30, features: Features = ALL) -> SearchStrategy[tuple[Case, Labels]]:
    """Programs with a region for each node, or None: some partitions are legal, some are cyclic."""
    pairs = st.tuples(programs(max_nodes=max_nodes, features=features), labellings())
    return pairs.map(lambda pair: (pair[0], label(pair[0].graph_module.graph, pair[1])))


def nests(*, max_nodes: int = 48, features: Features = ALL) -> SearchStrategy[Case]:
    """Programs of modes in one another: nested, crossing, left open."""
    kinds = st.sampled_from((*NEST_KINDS, *NEST_KINDS, *kinds_in(("functions", "mutations", "random"))))
    plain = recipes(max_nodes=max_nodes, features=features)
    steps = st.lists(st.builds(Step, kind=kinds, picks=_picks()), max_size=max_nodes).map(tuple)
    return st.builds(lambda recipe, steps: build(replace(recipe, steps=steps)), plain, steps)


def captured_programs() -> SearchStrategy[Case]:
    """Small models captured by torch's own tracers, some with symbolic sizes; tens of milliseconds to seconds each."""
    return st.sampled_from(CAPTURES).map(lambda capture: captured_case(*capture))


def recipes(*, max_nodes: int = 30, features: Features = ALL) -> SearchStrategy[Recipe]:
    """Recipes for programs; deleting steps and lowering picks both keep a recipe a recipe."""
    pick, picks = st.integers(0, LARGEST_PICK), _picks()
    inputs = st.builds(Input, kind=st.sampled_from(INPUT_KINDS if features.inputs else PLAIN_INPUT_KINDS), pick=pick)
    outputs = st.sampled_from(OUTPUT_KINDS if features.outputs else PLAIN_OUTPUT_KINDS)
    return st.builds(
        Recipe,
        inputs=st.lists(inputs, min_size=1, max_size=_MOST_INPUTS).map(tuple),
        steps=_kinds(features)
        .flatmap(lambda kinds: st.lists(st.builds(Step, kind=st.sampled_from(kinds), picks=picks), max_size=max_nodes))
        .map(tuple),
        output=st.builds(Step, kind=outputs, picks=picks),
        pytree=st.booleans() if features.pytree else st.just(False),
        training=st.booleans(),
        restores_grad=st.booleans(),
        metadata=st.sampled_from(METADATA) if features.metadata else st.just("none"),
        odd_names=st.integers(0, 4) if features.names else st.just(0),
        max_nodes=st.just(max_nodes),
    )


def labellings() -> SearchStrategy[Labelling]:
    """Ways to label a graph."""
    return st.builds(
        Labelling,
        style=st.sampled_from(tuple(LABEL_STYLES)),
        count=st.integers(1, 5),
        salt=st.integers(0, 255),
        gap=st.sampled_from((0, 5, 3, 2)),
        toggles=st.booleans(),
        reverse=st.booleans(),
    )


def _picks() -> SearchStrategy[Picks]:
    pick = st.integers(0, LARGEST_PICK)
    return st.tuples(pick, pick, pick, pick)


def _kinds(features: Features) -> SearchStrategy[tuple[str, ...]]:
    families = families_of(features)
    some = st.lists(st.sampled_from(families), unique=True, max_size=len(families))
    return some.map(lambda chosen: kinds_in((*chosen, "functions")))
