"""Steps with effects that no value shows: checks, unknown Python functions, hooks, operators that run a body."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import symbolic_trace

from partita.testing.draft import Draft
from partita.testing.functions import branches, bump, clip_gradient, halve, halve_gradient, jitter, note, peel
from partita.testing.recipe import Picks
from partita.testing.steps.views import view_of

__all__ = ["CHECKS", "HIGHER_ORDER", "HOOKS", "UNKNOWN"]

aten = torch.ops.aten


def assertion(draft: Draft, picks: Picks) -> None:
    """An assertion on a size, as torch.fx records it."""
    rows = draft.method("size", draft.matrix(picks[0]), 0)
    draft.call(_ASSERT, draft.call(operator.eq, rows, 4), "there are four rows")


def tensor_assertion(draft: Draft, picks: Picks) -> None:
    finite = draft.call(torch.isfinite, draft.method("nan_to_num", draft.tensor(picks[0])))
    draft.call(aten._assert_async.msg, draft.method("all", finite), "all is finite")


def constraint(draft: Draft, picks: Picks) -> None:
    """An operator that returns nothing and writes nothing."""
    rows = draft.method("size", draft.matrix(picks[0]), 0)
    draft.call(aten.sym_constrain_range_for_size.default, rows)


def unknown_pure(draft: Draft, picks: Picks) -> None:
    draft.call((halve, peel)[picks[1] % 2], draft.tensor(picks[0]))


def unknown_write(draft: Draft, picks: Picks) -> None:
    draft.call((bump, note)[picks[1] % 2], draft.writable(picks[0]))


def unknown_draw(draft: Draft, picks: Picks) -> None:
    draft.call(jitter, draft.tensor(picks[0]))


def unknown_containers(draft: Draft, picks: Picks) -> None:
    parts = draft.call(operator.getitem, draft.call(branches, draft.tensor(picks[0])), "parts")
    draft.call(operator.getitem, draft.call(operator.getitem, parts, 1), picks[1] % 2)


def hook(draft: Draft, picks: Picks) -> None:
    """A hook that changes the gradient of a result that is there, and may be written or viewed later."""
    draft.call((halve_gradient, clip_gradient)[picks[1] % 2], draft.tensor(picks[0], _has_history))


def hook_on_written(draft: Draft, picks: Picks) -> None:
    """A hook on a tensor between two writes to it, so that it is about one version of it."""
    written = draft.tensor(picks[0], lambda value: _has_history(value) and draft.may_write(value))
    draft.method("mul_", written, 0.5)
    draft.call((halve_gradient, clip_gradient)[picks[1] % 2], written)
    draft.method("add_", written, 0.25)


def hook_on_view(draft: Draft, picks: Picks) -> None:
    view = view_of(draft, draft.tensor(picks[0], _has_history), picks[1])
    draft.call((halve_gradient, clip_gradient)[picks[2] % 2], view)


def _has_history(value: Tensor) -> bool:
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # A view that autograd forbids, since its base was written under another mode.
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
    operand = draft.writable(picks[0])
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

CHECKS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "checks.assertion": assertion,
    "checks.tensor_assertion": tensor_assertion,
    "checks.constraint": constraint,
}
UNKNOWN: Mapping[str, Callable[[Draft, Picks], None]] = {
    "unknown.pure": unknown_pure,
    "unknown.write": unknown_write,
    "unknown.draw": unknown_draw,
    "unknown.containers": unknown_containers,
}
HOOKS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "hooks.result": hook,
    "hooks.written": hook_on_written,
    "hooks.view": hook_on_view,
}
HIGHER_ORDER: Mapping[str, Callable[[Draft, Picks], None]] = {
    "higher_order.grad": grad_body,
    "higher_order.autocast": autocast_body,
    "higher_order.write": writing_body,
    "higher_order.alike": alike,
}
