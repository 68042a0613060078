"""Steps with side effects and state: random numbers, checks, unknown functions, hooks, bodies, modules, attributes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.nn import functional

from partita.testing.generator.draft import Draft, Steps, on_default_device
from partita.testing.generator.recipe import Picks
from partita.testing.generator.state import (
    ATTRIBUTES,
    branches,
    bump,
    clip_gradient,
    halve,
    halve_gradient,
    jitter,
    note,
    peel,
)
from partita.testing.generator.steps.memory import view_of

aten = torch.ops.aten


def noise(draft: Draft, picks: Picks) -> None:
    match picks[1] % 4:
        case 0:
            draft.call(torch.rand_like, draft.tensor(picks[0]))
        case 1:
            draft.call(torch.randn, 4, 6, **on_default_device())
        case 2:
            draft.call(aten.rand_like.default, draft.tensor(picks[0]))
        case _:
            draft.call(torch.bernoulli, draft.call(torch.sigmoid, draft.tensor(picks[0])))


def dropout(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    match picks[1] % 3:
        case 0:
            draft.call(functional.dropout, tensor, 0.5, training=True)
        case 1:
            draft.call(torch.dropout, tensor, 0.25, True)
        case _:
            draft.call(aten.dropout.default, tensor, 0.25, True)


def inplace(draft: Draft, picks: Picks) -> None:
    draft.method(("bernoulli_", "uniform_", "normal_")[picks[1] % 3], draft.mutable(picks[0]))


def own_generator(draft: Draft, picks: Picks) -> None:
    """Noise from a generator of the program."""
    source = draft.attribute("generator")
    if picks[0] % 2:
        draft.method("uniform_", draft.mutable(picks[1]), generator=source)
    else:
        draft.call(torch.rand, 4, 6, generator=source, **on_default_device())


def shuffled(draft: Draft, picks: Picks) -> None:
    order = draft.call(torch.randperm, 4, **on_default_device())
    draft.call(torch.index_select, draft.matrix(picks[0]), 0, order)


RANDOM: Steps = {
    "random.noise": noise,
    "random.dropout": dropout,
    "random.inplace": inplace,
    "random.shuffled": shuffled,
    "random.own_generator": own_generator,
}


def assertion(draft: Draft, picks: Picks) -> None:
    """An assertion on a size, as torch.fx records it."""
    rows = draft.method("size", draft.matrix(picks[0]), 0)
    draft.call(_ASSERT, draft.call(operator.eq, rows, 4), "there are four rows")


def tensor_assertion(draft: Draft, picks: Picks) -> None:
    finite = draft.call(torch.isfinite, draft.method("nan_to_num", draft.tensor(picks[0])))
    draft.call(aten._assert_async.msg, draft.method("all", finite), "all is finite")


def constraint(draft: Draft, picks: Picks) -> None:
    """An operator that returns nothing and mutates nothing."""
    rows = draft.method("size", draft.matrix(picks[0]), 0)
    draft.call(aten.sym_constrain_range_for_size.default, rows)


def unknown_containers(draft: Draft, picks: Picks) -> None:
    parts = draft.call(operator.getitem, draft.call(branches, draft.tensor(picks[0])), "parts")
    draft.call(operator.getitem, draft.call(operator.getitem, parts, 1), picks[1] % 2)


def hook(draft: Draft, picks: Picks) -> None:
    """A hook that changes the gradient of a result, which may be mutated or viewed later."""
    draft.call((halve_gradient, clip_gradient)[picks[1] % 2], draft.tensor(picks[0], _has_history))


def hook_on_mutated(draft: Draft, picks: Picks) -> None:
    """A hook on a tensor between two mutations of it, so that it belongs to one version of it."""
    mutated = draft.tensor(picks[0], lambda value: _has_history(value) and draft.may_mutate(value))
    draft.method("mul_", mutated, 0.5)
    draft.call((halve_gradient, clip_gradient)[picks[1] % 2], mutated)
    draft.method("add_", mutated, 0.25)


def hook_on_view(draft: Draft, picks: Picks) -> None:
    view = view_of(draft, draft.tensor(picks[0], _has_history), picks[1])
    draft.call((halve_gradient, clip_gradient)[picks[2] % 2], view)


def _has_history(value: Tensor) -> bool:
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # A view that autograd forbids, since its base was mutated under another mode.
        return False


def grad_body(draft: Draft, picks: Picks) -> None:
    operand = draft.matrix(picks[0])
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    results = draft.call(wrap, picks[1] % 3 == 2, draft.attribute("body"), operand)
    draft.call(operator.getitem, results, picks[2] % 2)


def autocast_body(draft: Draft, picks: Picks) -> None:
    operand = draft.matrix(picks[0])
    options = ("cpu", torch.bfloat16, picks[1] % 2 == 0, None)
    results = draft.call(torch.ops.higher_order.wrap_with_autocast, *options, draft.attribute("body"), operand)
    draft.call(operator.getitem, results, picks[2] % 2)


def writing_body(draft: Draft, picks: Picks) -> None:
    operand = draft.mutable(picks[0])
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    draft.call(operator.getitem, draft.call(wrap, False, draft.attribute("writing_body"), operand), 0)


def alike(draft: Draft, picks: Picks) -> None:
    """A body below a module whose name is the path of a layer with underscores for dots."""
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    results = draft.call(wrap, picks[1] % 2 == 0, draft.attribute("outer_part.body"), draft.matrix(picks[0]))
    draft.module("outer.part", draft.call(operator.getitem, results, picks[2] % 2))


def _recorded_assertion() -> Callable[..., Any]:
    """The function that torch.fx itself records for a specialised argument; its name is private to torch."""
    graph = symbolic_trace(lambda x, number: x, concrete_args={"number": 1}).graph
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.eq]
    target: Callable[..., Any] = calls[0].target
    return target


_ASSERT = _recorded_assertion()

CHECKS: Steps = {
    "checks.assertion": assertion,
    "checks.tensor_assertion": tensor_assertion,
    "checks.constraint": constraint,
}
UNKNOWN: Steps = {
    "unknown.pure": lambda draft, picks: draft.call((halve, peel)[picks[1] % 2], draft.tensor(picks[0])),
    "unknown.write": lambda draft, picks: draft.call((bump, note)[picks[1] % 2], draft.mutable(picks[0])),
    "unknown.random": lambda draft, picks: draft.call(jitter, draft.tensor(picks[0])),
    "unknown.containers": unknown_containers,
}
HOOKS: Steps = {"hooks.result": hook, "hooks.mutated": hook_on_mutated, "hooks.view": hook_on_view}
HIGHER_ORDER: Steps = {
    "higher_order.grad": grad_body,
    "higher_order.autocast": autocast_body,
    "higher_order.write": writing_body,
    "higher_order.alike": alike,
}


_PURE = ("linear", "blocks.0.linear", "norm", "frozen_batch", "submod_0")


def embedding(draft: Draft, picks: Picks) -> None:
    """A layer that renormalizes the rows of its weight that it reads, in-place."""
    draft.module("embedding", draft.call(torch.argmax, draft.matrix(picks[0]), dim=picks[1] % 2))


def alike_layers(draft: Draft, picks: Picks) -> None:
    """Two layers whose paths are the same once dots become underscores."""
    hidden = draft.module("blocks.0.linear", draft.matrix(picks[0]))
    draft.module("blocks_0_linear", draft.matrix(picks[1]) if picks[2] % 2 else hidden)


def attribute(draft: Draft, picks: Picks) -> None:
    paths = tuple(ATTRIBUTES)
    draft.attribute(paths[(picks[0] + picks[1]) % len(paths)])


def linear(draft: Draft, picks: Picks) -> None:
    """A functional layer whose weight has two names."""
    matrix = draft.matrix(picks[0])
    weight = draft.attribute(("weight", "tied.weight", "linear.weight")[picks[1] % 3])
    draft.call(functional.linear, matrix, weight, draft.attribute("bias") if picks[2] % 2 else None)


def scale(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    draft.call(torch.mul, matrix, draft.attribute(("encoder.scale", "cache_row")[picks[1] % 2]))


def shift(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    draft.call(torch.add, matrix, draft.attribute(("encoder.shift", "cache", "twin", "frozen")[picks[1] % 4]))


def statistics(draft: Draft, picks: Picks) -> None:
    """A read of a buffer that a module mutates."""
    draft.call(torch.sub, draft.matrix(picks[0]), draft.attribute("batch.running_mean"))


MODULES: Steps = {
    "modules.layer": lambda draft, picks: draft.module(_PURE[picks[1] % len(_PURE)], draft.matrix(picks[0])),
    "modules.inplace": lambda draft, picks: draft.module("relu", draft.mutable(picks[0])),
    "modules.batch_norm": lambda draft, picks: draft.module("batch", draft.matrix(picks[0])),
    "modules.dropout": lambda draft, picks: draft.module("dropout", draft.matrix(picks[0])),
    "modules.meter": lambda draft, picks: draft.module("meter", draft.tensor(picks[0])),
    "modules.nested": lambda draft, picks: draft.module("nested", draft.matrix(picks[0])),
    "modules.embedding": embedding,
    "modules.alike": alike_layers,
}
ATTRIBUTE_READS: Steps = {
    "attributes.read": attribute,
    "attributes.linear": linear,
    "attributes.scale": scale,
    "attributes.shift": shift,
    "attributes.statistics": statistics,
}
