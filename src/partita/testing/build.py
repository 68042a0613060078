"""Building: from a recipe, always the same case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule

from partita.testing.case import Case
from partita.testing.draft import Draft, UnfitError
from partita.testing.features import ALL, Features
from partita.testing.inputs import arguments_of, in_order, new_graph, receive_inputs
from partita.testing.metadata import annotate
from partita.testing.outputs import place_output
from partita.testing.recipe import Input, Recipe
from partita.testing.seeds import random_crossing_recipe, random_nest_recipe, random_recipe
from partita.testing.state import State, forget
from partita.testing.steps.modes import close_modes
from partita.testing.steps.table import CROSSING_STEPS, NEST_STEPS, STEPS

__all__ = ["build", "random_case", "random_crossing", "random_nest"]


def random_case(seed: int, *, max_nodes: int = 30, features: Features = ALL) -> Case:
    """The case of that number, without hypothesis: some milliseconds each."""
    return build(random_recipe(seed, max_nodes=max_nodes, features=features))


def random_crossing(seed: int, *, max_nodes: int = 36, features: Features = ALL) -> Case:
    """The case of that number with hooks on tensors, and writes through views and indices, that cross regions."""
    return build(random_crossing_recipe(seed, max_nodes=max_nodes, features=features))


def random_nest(seed: int, *, max_nodes: int = 48, features: Features = ALL) -> Case:
    """The case of that number whose modes are nested, up to eight deep, and crossing or left open here and there."""
    return build(random_nest_recipe(seed, max_nodes=max_nodes, features=features))


def build(recipe: Recipe) -> Case:
    """The program that `recipe` describes, less the steps that do not fit, in the state before its first call."""
    ambient = torch.inference_mode(False), torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices=[]), ambient[0], ambient[1]:
        inputs = in_order(recipe.inputs, pytree=recipe.pytree)
        draft, taken = _drafted(recipe, inputs)
        # Drafting wrote to the state and the arguments that it ran on, so the case gets fresh ones.
        state = State(training=recipe.training, used=draft.state.used)
        graph_module = GraphModule(state.root, draft.graph)
        forget(graph_module, state.used)
        arguments = arguments_of(inputs, pytree=recipe.pytree)
        annotated = annotate(graph_module, recipe.metadata, arguments.args if recipe.pytree else arguments.placed)
    traits = (*taken, *_other_traits(recipe, inputs, annotated=annotated))
    return Case(graph_module, arguments.args, arguments.kwargs, tuple(dict.fromkeys(traits)), str(recipe))


_ALL_STEPS = {**STEPS, **NEST_STEPS, **CROSSING_STEPS}


def _drafted(recipe: Recipe, inputs: Sequence[Input]) -> tuple[Draft, list[str]]:
    # Autocast keeps the leaves that it has cast until the outermost block is left, and does not notice when they are
    # written. Of blocks that cross no nest is left, so that in these programs leaves are not written.
    crosses = any(step.kind in ("nests.cross", "nests.forget") for step in recipe.steps)
    state = State(training=recipe.training)
    draft = Draft(new_graph(pytree=recipe.pytree), state, odd_names=recipe.odd_names, keeps_leaves=crosses)
    with draft.running():
        receive_inputs(draft, inputs, arguments_of(inputs, pytree=recipe.pytree))
        taken = _take_steps(draft, recipe)
        close_modes(draft, restores_grad=recipe.restores_grad)
        place_output(draft, recipe.output, pytree=recipe.pytree)
    return draft, taken


def _take_steps(draft: Draft, recipe: Recipe) -> list[str]:
    """Takes each step that fits while there is room, and says which kinds were taken."""
    taken = []
    for step in recipe.steps:
        if len(draft.graph.nodes) + len(draft.open) + 2 >= recipe.max_nodes:
            break
        try:
            _ALL_STEPS[step.kind](draft, step.picks)
        except UnfitError:
            continue
        taken.append(step.kind)
    return taken


def _other_traits(recipe: Recipe, inputs: Sequence[Input], *, annotated: bool) -> Iterator[str]:
    """What a case contains besides its steps."""
    for item in inputs:
        yield f"input.{item.kind}"
    yield "output.pytree" if recipe.pytree else f"output.{recipe.output.kind}"
    if annotated:
        yield f"metadata.{recipe.metadata}"
    if recipe.odd_names:
        yield "names.odd"
    yield "training.on" if recipe.training else "training.off"
