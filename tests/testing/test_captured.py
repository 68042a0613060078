"""Captured programs run, repeat themselves, and have the sizes that their tracers give them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from partita.testing import CAPTURES, Case, captured_case

captured = cache(captured_case)


def outcome(case: Case) -> list[object]:
    torch.manual_seed(0)
    with torch.enable_grad():
        returned = case.run()
    return [leaf.tolist() if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves([returned, *case.args])]


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


@pytest.mark.parametrize("route", sorted({route for _, route in CAPTURES}))
def test_captured_programs_run_and_repeat_themselves(route: str) -> None:
    for model in [model for model, other in CAPTURES if other == route]:
        case = captured(model, route)
        assert outcome(case.copy()) == outcome(case.copy()), case.origin


@pytest.mark.parametrize(
    ("route", "key"), [("export_dynamic", "val"), ("make_fx_symbolic", "val"), ("dynamo", "example_value")]
)
def test_captured_programs_have_symbolic_sizes(route: str, key: str) -> None:
    values = [node.meta.get(key) for node in captured("Attention", route).graph_module.graph.nodes]
    sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    assert any(isinstance(size, torch.SymInt) for size in sizes)


@pytest.mark.parametrize("route", ["symbolic_trace", "make_fx", "dynamo"])
def test_a_block_without_gradients_is_captured_as_toggles(route: str) -> None:
    targets = [str(node.target) for node in captured("Frozen", route).graph_module.graph.nodes]
    assert any("set_grad_enabled" in target for target in targets) == (route != "symbolic_trace")
