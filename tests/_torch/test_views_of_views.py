"""Views of views: a dry run of many would take much memory, and of models that are only deep takes little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests._torch.test_dry_runs import fake, program_with, traced
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita import capture, plan
from partita._torch import dry_runs
from partita._torch.dry_runs import views_added
from partita._torch.operator_schemas import is_higher_order, storage_key
from partita.policies import BySize
from partita.program.dry_run_refusals import refusal_in_graphs
from partita.program.saved_tensors import saved_tensors_of
from partita.treatments import Recompute

aten = torch.ops.aten


def _chain(targets: list[Any]) -> Callable[[Graph, Node], Any]:
    def write(graph: Graph, x: Node) -> None:
        for target in targets:
            x = traced(graph, x.meta["val"], target, x)

    return write


@pytest.mark.parametrize(
    ("targets", "is_run"),
    [
        ([aten.alias.default] * 100, True),
        ([aten.alias.default] * 101, False),
        ([aten.atleast_2d.default] * 101, False),
        ([*[aten.alias.default] * 60, aten.sin_.default] * 2, False),
        ([*[aten.alias.default] * 60, aten.sin.default] * 2, True),
        ([*[aten.alias.default] * 60, aten.selu.default] * 2, True),
        ([*[aten.alias.default] * 60, aten.conj_physical.default] * 2, False),
        ([aten.selu.default] * 120, True),
    ],
)
def test_views_of_many_views_are_not_tried(targets: list[Any], is_run: bool) -> None:
    reason = saved_tensors_of(program_with(_chain(targets))).reason
    assert reason is None if is_run else "is not tried: it is a view of more than 100 views" in str(reason)


def test_operators_that_never_return_views_are_composite() -> None:
    """All others are known by their schemas."""
    for name in (*dry_runs._NEVER_VIEWS, *dry_runs._RETURNS_ARGUMENT):
        packet = getattr(aten, name.removeprefix("aten::"))
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        assert any(views_added(op) is None for op in overloads) or name in dry_runs._RETURNS_ARGUMENT, name
        assert any(dry_runs.is_composite(op) for op in overloads), name


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.adaptive_avg_pool2d.default, ([1, 1],)),
        (aten.clip.default, (None, 10.0)),
        (aten.float_power.Tensor_Scalar, (1.0,)),
        (aten.linear.default, (torch.ones(1, 1),)),
        (aten.matmul.default, (torch.ones(1, 1),)),
        (aten.max_pool2d.default, ([1, 1],)),
        (aten.pad.default, ([0, 0],)),
        (aten.prelu.default, (torch.ones(1),)),
        (aten.softmax.int, (-1,)),
        (aten.take_along_dim.default, (torch.zeros(1, 1, 1, 1, dtype=torch.long),)),
        (aten.tile.default, ([1],)),
        (aten.upsample_bilinear2d.vec, (None, False, [1.0, 1.0])),
        (aten.upsample_nearest2d.vec, (None, [1.0, 1.0])),
    ],
)
def test_what_counts_as_no_view_shares_no_memory(target: Any, args: tuple[Any, ...]) -> None:
    """Not even where the result is equal to the argument."""
    x = torch.ones(1, 1, 1, 1)
    assert views_added(target) is None
    assert storage_key(target(x, *args)) != storage_key(x)


def _body(targets: Sequence[Any]) -> GraphModule:
    graph = Graph()
    x = last = graph.placeholder("x")
    x.meta["val"] = fake(4, 4)
    for target in targets:
        last = traced(graph, x.meta["val"], target, last)
    graph.output(last)
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("before", "body", "calls", "is_run"),
    [
        (0, [aten.alias.default] * 60, 2, False),
        (0, [aten.alias.default] * 101, 1, False),
        (0, [aten.alias.default] * 30, 3, True),
        (60, [*[aten.alias.default] * 60, aten.sin.default], 1, False),
        (60, [aten.sin.default, *[aten.alias.default] * 60], 1, True),
        (40, [*[aten.alias.default] * 40, aten.sin.default, *[aten.alias.default] * 40], 6, True),
        (0, [aten.sin.default, *[aten.alias.default] * 60], 2, True),
        (0, [*[aten.alias.default] * 60, aten.sin.default, *[aten.alias.default] * 60], 2, False),
    ],
)
def test_views_of_views_in_bodies_are_counted(before: int, body: list[Any], calls: int, is_run: bool) -> None:
    """A body is called so many times, one after the other, first with a view of views."""
    root = nn.Module()
    root.add_module("body", _body(body))
    graph = Graph()
    x = last = graph.placeholder("x")
    x.meta["val"] = fake(4, 4)
    for _ in range(before):
        last = traced(graph, x.meta["val"], aten.alias.default, last)
    for _ in range(calls):
        wrap: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
        last = traced(graph, x.meta["val"], wrap, True, graph.get_attr("body"), last)
    graph.output(last)
    reason = refusal_in_graphs(GraphModule(root, graph))
    assert reason is None if is_run else "a view of more than 100 views" in str(reason)


def _stack(make: Callable[[], nn.Module], count: int) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1), nn.Unflatten(-1, (2, 2)), nn.Flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (_stack(lambda: nn.Softmax(-1), 101), (2, 4)),
        (_stack(lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), 60), (2, 4)),
        (_stack(lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.SELU()), 40), (1, 2, 4, 4)),
    ],
    ids=["softmax", "linear", "convolution"],
)
def test_deep_models_are_tried(model: nn.Module, shape: tuple[int, ...]) -> None:
    program = capture(model, (torch.randn(shape),))
    assert saved_tensors_of(program).reason is None


def test_many_recomputed_blocks_are_tried() -> None:
    program = capture(_stack(_Block, 30), (torch.randn(2, 4),))
    treated = plan(program, BySize(parts=30), Recompute()).apply()
    assert len([node for node in treated.graph.nodes if is_higher_order(node.target)]) == 30
    assert saved_tensors_of(treated).reason is None
