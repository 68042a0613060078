"""What a recomputed body must not do with what it is given: refused before anything happens, in words that are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import square
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import partita
from partita import recompute
from partita.errors import RecomputeError
from partita.policies import BySize
from partita.treatments import Recompute

_checkpoint = recompute.wrap_activation_checkpoint
aten = torch.ops.aten


def _planned(body: GraphModule) -> nn.Module:
    return partita.plan(partita.Program.of(body), BySize(parts=1), Recompute()).apply().module()


def test_a_refused_module_has_not_run() -> None:
    norm = nn.BatchNorm1d(4)
    with pytest.raises(RecomputeError, match="the body mutates 'running_mean', 'running_var', 'num_batches_tracked'"):
        _checkpoint(norm, square())
    assert not norm.running_mean.any()  # type: ignore[union-attr]
    assert norm.num_batches_tracked == 0


def _writing_a_parameter() -> GraphModule:
    root, graph = nn.Module(), Graph()
    root.weight = nn.Parameter(torch.ones(4))
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    hidden = graph.call_function(aten.sin.default, (graph.call_function(aten.add.Tensor, (x, weight)),))
    graph.call_function(aten.add_.Tensor, (graph.call_function(aten.detach.default, (weight,)), 1.0))
    graph.output(graph.call_function(aten.sin.default, (hidden,)))
    return GraphModule(root, graph)


def test_a_graph_that_writes_a_parameter_is_told_that_a_plan_can_undo_it() -> None:
    with pytest.raises(RecomputeError, match=r"the body mutates 'weight', .*; recompute it by a plan, which knows"):
        _checkpoint(_writing_a_parameter(), square())
    x, plain, planned = square(), _writing_a_parameter(), _planned(_writing_a_parameter())
    assert torch.equal(*(torch.autograd.grad(run(x).sum(), x)[0] for run in (plain, planned)))
    assert torch.equal(plain.weight, next(planned.parameters()))  # type: ignore[arg-type]


def test_a_sparse_operand_that_is_written_is_refused() -> None:
    body = symbolic_trace(lambda adjacency, x: torch.sparse.mm(adjacency.mul_(2), x).sin())
    planned = partita.plan(partita.Program.of(body), BySize(parts=1), Recompute()).apply().module()
    for run in (planned, lambda *operands: _checkpoint(body, *operands)):
        with pytest.raises(RecomputeError, match="'argument 0'"):
            run(torch.eye(4).to_sparse(), square())


DRAWING: dict[str, Any] = {
    "in its place": lambda x, generator: aten.rrelu.default(x.sin(), 0.1, 0.9, True, generator).sin(),
    "of a function": lambda x, generator: torch.poisson(x.sin().abs(), generator) * x,
    "by keyword": lambda x, generator: x.sin() * torch.rand(4, 4, generator=generator),
}


@pytest.mark.parametrize("body", DRAWING.values(), ids=DRAWING)
def test_a_generator_of_its_own_is_refused(body: Any) -> None:
    with pytest.raises(RecomputeError, match="uses its own random number generator"):
        _planned(symbolic_trace(body))


def test_a_generator_is_found_in_a_body_of_an_operator() -> None:
    root, graph = nn.Module(), Graph()
    root.body = symbolic_trace(lambda x, generator: torch.bernoulli(x, generator=generator))
    operands = (graph.get_attr("body"), graph.placeholder("x"), graph.placeholder("generator"))
    drawn = graph.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (True, *operands))
    graph.output(graph.call_method("sin", (drawn,)))
    with pytest.raises(RecomputeError, match=r"node 'bernoulli' in region .* uses its own random number generator"):
        _planned(GraphModule(root, graph))


def test_draws_from_the_default_generator_are_no_draws_from_an_own_one() -> None:
    def body(x: Tensor) -> Tensor:
        return aten.rrelu.default(torch.poisson(x, None), 0.1, 0.9, True, None) + torch.bernoulli(x, 0.5)

    effectful = partita.Program.of(symbolic_trace(body)).calls.effectful
    assert [effects.own_generator for effects in effectful.values() if effects.uses_rng] == [False] * 3
