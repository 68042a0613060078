"""Building: from a recipe, always the same case."""

from __future__ import annotations

from torch.fx import GraphModule

from partita.testing.case import Case
from partita.testing.draft import Draft, Unfit
from partita.testing.features import ALL, Features
from partita.testing.inputs import arguments_of, in_order, new_graph, receive_inputs
from partita.testing.metadata import annotate
from partita.testing.outputs import place_output
from partita.testing.recipe import Recipe
from partita.testing.seeds import random_recipe
from partita.testing.state import State, forget
from partita.testing.steps.modes import close_modes
from partita.testing.steps.table import STEPS

__all__ = ["build", "random_case"]


def random_case(seed: int, *, max_nodes: int = 30, features: Features = ALL) -> Case:
    """The case of that number, without hypothesis: some milliseconds each."""
    return build(random_recipe(seed, max_nodes=max_nodes, features=features))


def build(recipe: Recipe) -> Case:
    """The program that `recipe` describes, less the steps that do not fit, with state and arguments as before any call."""
    inputs = in_order(recipe.inputs, pytree=recipe.pytree)
    draft = Draft(new_graph(pytree=recipe.pytree), State(training=recipe.training), odd_names=recipe.odd_names)
    with draft.running():
        receive_inputs(draft, inputs, arguments_of(inputs, pytree=recipe.pytree))
        traits = _take_steps(draft, recipe)
        close_modes(draft, restores_grad=recipe.restores_grad)
        place_output(draft, recipe.output, pytree=recipe.pytree)
    # Drafting wrote to the state and the arguments that it ran on, so the case gets fresh ones.
    state = State(training=recipe.training, used=draft.state.used)
    graph_module = GraphModule(state.root, draft.graph)
    forget(graph_module, state.used)
    arguments = arguments_of(inputs, pytree=recipe.pytree)
    annotated = annotate(graph_module, recipe.metadata, arguments.args if recipe.pytree else arguments.placed)
    traits += [f"input.{item.kind}" for item in inputs] + [f"output.{recipe.output.kind}"] * (not recipe.pytree)
    traits += [f"metadata.{recipe.metadata}"] * annotated + ["pytree"] * recipe.pytree
    traits += ["training" if recipe.training else "evaluation"] + ["odd_names"] * bool(recipe.odd_names)
    return Case(graph_module, arguments.args, arguments.kwargs, tuple(dict.fromkeys(traits)), str(recipe))


def _take_steps(draft: Draft, recipe: Recipe) -> list[str]:
    """Takes each step that fits while there is room, and says which kinds were taken."""
    taken = []
    for step in recipe.steps:
        if len(draft.graph.nodes) + len(draft.open) + 2 >= recipe.max_nodes:
            break
        try:
            STEPS[step.kind](draft, step.picks)
        except Unfit:
            continue
        taken.append(step.kind)
    return taken
