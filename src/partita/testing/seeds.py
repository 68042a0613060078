"""Seeds: recipes drawn from a numbered random source, for more programs than hypothesis has patience for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from partita.testing.features import ALL, Features
from partita.testing.inputs import INPUT_KINDS, PLAIN_INPUT_KINDS
from partita.testing.nests import nest_steps
from partita.testing.outputs import OUTPUT_KINDS, PLAIN_OUTPUT_KINDS
from partita.testing.recipe import METADATA, Input, Recipe, Step, drawn_pick, drawn_picks
from partita.testing.steps.table import crossing_kinds, families_of, kinds_in

__all__ = ["random_crossing_recipe", "random_nest_recipe", "random_recipe"]


def random_recipe(seed: int, *, max_nodes: int = 30, features: Features = ALL) -> Recipe:
    """The recipe of that number.

    Each draws from about half of the families only, since programs made of a few things show what these do to one
    another, while programs made of everything show little of anything.
    """
    source = Random(seed)
    recipe = _recipe(source, _some_kinds(source, features), max_nodes=max_nodes, features=features)
    limits = f", max_nodes={max_nodes}" if max_nodes != 30 else ""
    return replace(recipe, source=f"random_case({seed}{limits}{_features_text(features)})")


def random_crossing_recipe(seed: int, *, max_nodes: int = 36, features: Features = ALL) -> Recipe:
    """The recipe of that number with hooks and writes that reach from one region into another."""
    source = Random(seed)
    kinds = (*_some_kinds(source, features), *crossing_kinds(features) * 3)
    recipe = _recipe(source, kinds, max_nodes=max_nodes, features=features)
    limits = f", max_nodes={max_nodes}" if max_nodes != 36 else ""
    return replace(recipe, source=f"random_crossing({seed}{limits}{_features_text(features)})")


def random_nest_recipe(seed: int, *, max_nodes: int = 48, features: Features = ALL) -> Recipe:
    """The recipe of that number for a nest of modes."""
    source = Random(seed)
    recipe = _recipe(source, _some_kinds(source, features), max_nodes=max_nodes, features=features)
    limits = f", max_nodes={max_nodes}" if max_nodes != 48 else ""
    made_by = f"random_nest({seed}{limits}{_features_text(features)})"
    return replace(recipe, steps=nest_steps(source, features, length=max_nodes), source=made_by)


def _recipe(source: Random, kinds: tuple[str, ...], *, max_nodes: int, features: Features) -> Recipe:
    inputs = INPUT_KINDS if features.inputs else PLAIN_INPUT_KINDS
    outputs = OUTPUT_KINDS if features.outputs else PLAIN_OUTPUT_KINDS
    return Recipe(
        inputs=(
            Input(source.choice((*PLAIN_INPUT_KINDS, "leaf"))),
            *(Input(source.choice(inputs), drawn_pick(source)) for _ in range(source.randrange(5))),
        ),
        steps=tuple(Step(source.choice(kinds), drawn_picks(source)) for _ in range(source.randint(1, max_nodes))),
        output=Step(source.choice((*outputs, "tuple")), drawn_picks(source)),
        pytree=features.pytree and source.random() < 0.12,
        training=source.random() < 0.7,
        restores_grad=source.random() < 0.6,
        metadata=source.choice((*METADATA, *["none"] * 5)) if features.metadata else "none",
        odd_names=source.randint(1, 4) if features.names and source.random() < 0.2 else 0,
        max_nodes=max_nodes,
    )


def _some_kinds(source: Random, features: Features) -> tuple[str, ...]:
    families = tuple(family for family in families_of(features) if source.random() < 0.6)
    return kinds_in((*families, "functions"))


def _features_text(features: Features) -> str:
    return f", features={features}" if features != ALL else ""
