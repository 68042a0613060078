"""Builds programs from recipes, and random recipes from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from partita._torch.modes import read_ambient, restore_autocast
from partita._torch.toggles import ENTER_INFERENCE
from partita.testing.generator.draft import EXITS, Case, Draft, UnfitError, restore_persistence
from partita.testing.generator.inputs import (
    INPUT_KINDS,
    PLAIN_INPUT_KINDS,
    arguments_of,
    in_order,
    new_graph,
    receive_inputs,
)
from partita.testing.generator.recipe import (
    ALL,
    METADATA,
    Features,
    Input,
    Picks,
    Recipe,
    Step,
    random_pick,
    random_picks,
)
from partita.testing.generator.state import State
from partita.testing.generator.steps import CROSSING_STEPS, NEST_STEPS, STEPS, crossing_kinds, families_of, kinds_in
from partita.testing.generator.steps.modes import close_modes


def random_case(seed: int, *, max_nodes: int = 30, features: Features = ALL) -> Case:
    """The case of a seed, without hypothesis: some milliseconds each."""
    return build(random_recipe(seed, max_nodes=max_nodes, features=features))


def random_crossing(seed: int, *, max_nodes: int = 36, features: Features = ALL) -> Case:
    """The case of a seed with hooks on tensors, and mutation through views and indices, that cross regions."""
    source = Random(seed)
    kinds = (*_some_kinds(source, features), *crossing_kinds(features) * 3)
    recipe = _recipe(source, kinds, max_nodes=max_nodes, features=features)
    text = _source("random_crossing", seed, features, max_nodes=max_nodes, default=36)
    return build(replace(recipe, source=text))


def random_nest(seed: int, *, max_nodes: int = 48, features: Features = ALL) -> Case:
    """The case of a seed whose modes are nested, up to eight deep, and sometimes crossing or left open."""
    return build(random_nest_recipe(seed, max_nodes=max_nodes, features=features))


def build(recipe: Recipe) -> Case:
    """The program that `recipe` describes, without the steps that do not fit, in the state before its first call."""
    ambient = torch.inference_mode(False), torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices=[]), ambient[0], ambient[1]:
        inputs = in_order(recipe.inputs, pytree=recipe.pytree)
        draft, kinds = _drafted(recipe, inputs)
        # Drafting mutated the state and the arguments that it ran on, so the case gets fresh ones.
        state = State(training=recipe.training, used=draft.state.used)
        graph_module = GraphModule(state.root, draft.graph)
        restore_persistence(graph_module, state.root)
        arguments = arguments_of(inputs, pytree=recipe.pytree)
        annotated = _annotate(graph_module, recipe.metadata, arguments.args if recipe.pytree else arguments.placed)
    traits = (*kinds, *_other_traits(recipe, inputs, annotated=annotated))
    return Case(graph_module, arguments.args, arguments.kwargs, tuple(dict.fromkeys(traits)), str(recipe))


_ALL_STEPS = {**STEPS, **NEST_STEPS, **CROSSING_STEPS}


def _drafted(recipe: Recipe, inputs: Sequence[Input]) -> tuple[Draft, list[str]]:
    # Autocast caches the leaves that it has cast until the outermost block is exited, and does not notice their
    # mutation. Blocks that cross may never be exited, so in these programs leaves are mutated nowhere.
    crosses = any(step.kind in ("nests.cross", "nests.forget") for step in recipe.steps)
    state = State(training=recipe.training)
    draft = Draft(new_graph(pytree=recipe.pytree), state, odd_names=recipe.odd_names, keeps_leaves=crosses)
    with draft.running():
        receive_inputs(draft, inputs, arguments_of(inputs, pytree=recipe.pytree))
        kinds = _add_steps(draft, recipe)
        close_modes(draft, restores_grad=recipe.restores_grad)
        chosen = _chosen(draft, recipe.output.picks)
        draft.graph.output(chosen[:3] if recipe.pytree else _structure(draft, recipe.output.kind, chosen))
    return draft, kinds


def _add_steps(draft: Draft, recipe: Recipe) -> list[str]:
    """Adds each step that fits while there is room; returns the kinds that were added."""
    kinds = []
    for step in recipe.steps:
        if len(draft.graph.nodes) + len(draft.open) + 2 >= recipe.max_nodes:
            break
        try:
            _ALL_STEPS[step.kind](draft, step.picks)
        except UnfitError:
            continue
        kinds.append(step.kind)
    return kinds


def _other_traits(recipe: Recipe, inputs: Sequence[Input], *, annotated: bool) -> Iterator[str]:
    """The traits of a case besides its steps."""
    for item in inputs:
        yield f"input.{item.kind}"
    yield "output.pytree" if recipe.pytree else f"output.{recipe.output.kind}"
    if annotated:
        yield f"metadata.{recipe.metadata}"
    if recipe.odd_names:
        yield "names.odd"
    yield "training.on" if recipe.training else "training.off"


def random_recipe(seed: int, *, max_nodes: int = 30, features: Features = ALL) -> Recipe:
    """The recipe of a seed.

    Each uses only about half of the families: a few kinds of steps interact more than a few steps of each kind.
    """
    source = Random(seed)
    recipe = _recipe(source, _some_kinds(source, features), max_nodes=max_nodes, features=features)
    return replace(recipe, source=_source("random_case", seed, features, max_nodes=max_nodes, default=30))


def random_nest_recipe(seed: int, *, max_nodes: int = 48, features: Features = ALL) -> Recipe:
    """The recipe of a seed for a nest of modes."""
    source = Random(seed)
    recipe = _recipe(source, _some_kinds(source, features), max_nodes=max_nodes, features=features)
    text = _source("random_nest", seed, features, max_nodes=max_nodes, default=48)
    return replace(recipe, steps=_nest_steps(source, features, length=max_nodes), source=text)


def _recipe(source: Random, kinds: tuple[str, ...], *, max_nodes: int, features: Features) -> Recipe:
    inputs = INPUT_KINDS if features.inputs else PLAIN_INPUT_KINDS
    outputs = OUTPUT_KINDS if features.outputs else PLAIN_OUTPUT_KINDS
    return Recipe(
        inputs=(
            Input(source.choice((*PLAIN_INPUT_KINDS, "leaf"))),
            *(Input(source.choice(inputs), random_pick(source)) for _ in range(source.randrange(5))),
        ),
        steps=tuple(Step(source.choice(kinds), random_picks(source)) for _ in range(source.randint(1, max_nodes))),
        output=Step(source.choice((*outputs, "tuple")), random_picks(source)),
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


def _source(name: str, seed: int, features: Features, *, max_nodes: int, default: int) -> str:
    """The call that builds the case of a recipe, without arguments that have their default."""
    limit = f", max_nodes={max_nodes}" if max_nodes != default else ""
    families = f", features={features}" if features != ALL else ""
    return f"{name}({seed}{limit}{families})"


_DEEPEST = 8
_OWN_WORK = ("nests.weight", "nests.only", "nests.border", "nests.body", "nests.toggle", "nests.empty")
_LEAVES = (*["nests.leave"] * 9, *["nests.cross"] * 3, "nests.forget")

#: The kinds of steps of a nest for hypothesis; as many exit a block as enter one.
NEST_KINDS = (
    *("nests.grad", "nests.queried", "nests.autocast", "nests.autocast", "nests.inference", "nests.again"),
    *("nests.leave", "nests.leave", "nests.leave", "nests.cross", "nests.cross", "nests.forget"),
    *_OWN_WORK,
)


def _nest_steps(source: Random, features: Features, *, length: int) -> tuple[Step, ...]:
    """Blocks in blocks, up to eight, with work at every depth.

    Some programs restore the grad mode by constants, as traced ones do, some query it first, and some do both; about
    half of them have no inference block, since torch has no operator for those.
    """
    grad = source.choice((("nests.grad",), ("nests.queried",), ("nests.grad", "nests.queried")))
    infers = features.inference and source.random() < 0.5
    blocks = (*grad * 4, *["nests.autocast"] * 5, "nests.again", *["nests.inference"] * (2 if infers else 0))
    work = (*_OWN_WORK * 4, *_other_kinds(source, features, infers=infers))
    kinds = islice(_kinds(source, blocks, work), source.randint(4, length))
    return tuple(Step(kind, random_picks(source)) for kind in kinds)


def _kinds(source: Random, blocks: tuple[str, ...], work: tuple[str, ...]) -> Iterator[str]:
    """Entries of blocks and exits from them in turn, endlessly."""
    depth = 0
    while True:
        for _ in range(source.randint(1, _DEEPEST - depth) if depth < _DEEPEST else 0):
            yield source.choice(blocks)
            yield from (source.choice(work) for _ in range(source.choice((0, 1, 1, 2))))
            depth += 1
        for _ in range(source.randint(1, depth)):
            yield source.choice(_LEAVES)
            yield from (source.choice(work) for _ in range(source.choice((0, 0, 1))))
            depth -= 1


def _other_kinds(source: Random, features: Features, *, infers: bool) -> tuple[str, ...]:
    families = (family for family in families_of(features) if infers or family != "inference")
    kinds = kinds_in((*(family for family in families if source.random() < 0.4), "functions"))
    # A module that enables gradients, whatever the mode was, does something else under callers without gradients.
    return tuple(kind for kind in kinds if kind != "grad.left_on")


PLAIN_OUTPUT_KINDS = ("single", "tuple")
OUTPUT_KINDS = ("single", "tuple", "list", "dict", "nested", "echo", "twice", "constant", "none", "whole", "number")


def _structure(draft: Draft, kind: str, chosen: Sequence[Node]) -> Any:
    """What the program returns, in every structure that a graph can return."""
    first, second, third, *more = chosen
    structures: dict[str, Any] = {
        "single": first,
        "tuple": (first, second, third, *more),
        "list": [first, second, third],
        "dict": {"first": first, "second": second},
        "nested": (first, {"inner": [second, (third, None)]}),
        "echo": (first, draft.inputs[0], second),
        "twice": (first, second, first),
        "constant": (1, first, None, "text", 0.5, second),
        "none": None,
        "whole": (_newest_of(draft, first, tuple, list, dict), first),
        "number": (first, _newest_of(draft, second, int, float)),
    }
    return structures[kind]


def _chosen(draft: Draft, picks: Picks) -> list[Node]:
    """Four tensors: the newest, one that requires a gradient where any does, and two from anywhere."""
    tensors = [node for node, value in draft.values.items() if isinstance(value, Tensor)]
    trained = [node for node in tensors if draft.values[node].requires_grad] or tensors
    return [
        tensors[-1],
        draft.choose(picks[0] % 4, trained),
        draft.choose(picks[1], tensors),
        draft.choose(picks[2], tensors),
    ]


def _newest_of(draft: Draft, otherwise: Node, *types: type) -> Node:
    found = draft.valued(*types)
    return found[-1] if found else otherwise


def _annotate(graph_module: GraphModule, style: str, placed: Sequence[object]) -> bool:
    """Adds metadata of this style to every node; False where the program does not run on fake tensors."""
    if style == "none":
        return True
    for place, node in enumerate(graph_module.graph.nodes):
        node.meta["custom"] = {"place": place, "inner": {"tags": [node.op]}}
        node.meta["stack_trace"] = f'  File "model.py", line {place + 1}, in forward\n'
    return style == "custom" or _propagate(graph_module, style, placed)


def _propagate(graph_module: GraphModule, style: str, placed: Sequence[object]) -> bool:
    nodes: list[Node] = list(graph_module.graph.nodes)
    if any(str(node.target).startswith("**") for node in nodes if node.op == "placeholder"):
        return False
    if any(node.target == "*args" for node in nodes if node.op == "placeholder"):
        *placed, rest = placed
        placed = [*placed, *tuple(cast(Iterable[object], rest))]
    done = _run_fake(graph_module, placed)
    for node in nodes:
        value = node.meta.pop("val", None)
        if not done or value is None:
            continue
        for key in ("val", "example_value") if style == "both" else (style,):
            node.meta[key] = value
    return done


def _run_fake(graph_module: GraphModule, placed: Sequence[object]) -> bool:
    found = read_ambient()
    with torch.enable_grad():
        try:
            _FakeRun(graph_module).propagate(*placed)
        # Reading a number from a fake tensor raises a different error for each kind of number.
        except Exception:
            return False
        finally:
            restore_autocast(found)
    return True


class _FakeRun(FakeTensorProp):
    """Runs a graph on fake tensors; where that fails, it exits the modes that the graph has entered."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self._open: dict[Node, Callable[[], object]] = {}
        self._fake_mode: Any = None

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().placeholder(target, args, kwargs)
        if self._fake_mode is None:
            self._fake_mode = cast(Any, value).fake_mode
        # Tensors inside of a container are not faked, and a real one would be mutated.
        is_real = isinstance(value, Tensor) and not hasattr(value, "fake_mode")
        return self._fake_mode.from_tensor(value) if is_real else value

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._fake_mode.from_tensor(value) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module.get_submodule(target)
        state = [*module.named_parameters(), *module.named_buffers()]
        fake_state = {name: self._fake_mode.from_tensor(tensor) for name, tensor in state}
        return functional_call(module, fake_state, args, kwargs)

    def run_node(self, node: Node) -> Any:
        if node.target is ENTER_INFERENCE and not node.users:
            return None  # The handle is dropped at once, which ends the block, but an interpreter keeps it.
        try:
            result = super().run_node(node)
        except Exception:
            # An inference block restores the dispatch state, so it must be exited before the fake mode is.
            for exit_block in reversed(self._open.values()):
                exit_block()
            raise
        if node.target in EXITS:
            self._open[node] = partial(EXITS[node.target], result)
        elif node.target in EXITS.values():
            del self._open[node.all_input_nodes[0]]
        return result


def dump(module: GraphModule) -> str:
    """Everything of a graph module that a pass could change, as text: nodes, metadata, attributes and state names."""
    lines = [f"{type(module).__name__} training={module.training} meta={sorted(map(str, module.meta))}"]
    for node in module.graph.nodes:
        extras = sorted(key for key in node.__dict__ if not key.startswith("__"))
        users = [user.name for user in node.users]
        lines.append(f"{node.format_node()} {node.name} {users} {_text(node.meta)} {extras}")
    lines += [f"{name} {id(tensor)}" for name, tensor in module.named_parameters(remove_duplicate=False)]
    lines += [f"{name} {id(tensor)}" for name, tensor in module.named_buffers(remove_duplicate=False)]
    return "\n".join(lines)


def _text(meta: object) -> str:
    if isinstance(meta, dict):
        return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in meta.items()) + "}"
    if isinstance(meta, list | tuple):
        return "[" + ", ".join(map(_text, meta)) + "]"
    return repr(meta) if isinstance(meta, str | int | float | bool | None) else f"{type(meta).__name__} {id(meta)}"
