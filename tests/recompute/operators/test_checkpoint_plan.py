"""What is known of a body that is recomputed: what it may do, while it is edited, copied, pickled and rewritten."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import Counted, assert_bitwise, every_operator, step
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import partita
from partita import Program, recompute
from partita.policies import ByLabel, BySize
from partita.recompute._torch.checkpoint_plan import CheckpointPlan, annotate_plan, plan_of_body
from partita.testing.captured import Buffered
from partita.treatments import Recompute

ATEN = torch.ops.aten
ADD_IN_PLACE = operator.iadd
NOTHING = CheckpointPlan(mutating=(), preserves_rng=False)


def _body(target: Any, *args: Any, **kwargs: Any) -> GraphModule:
    """A graph that calls one function on its input, and takes the sine of what that gives."""
    graph = Graph()
    called = graph.call_function(target, (graph.placeholder("x"), *args), kwargs)
    graph.output(graph.call_function(ATEN.sin.default, (called,)))
    return GraphModule(nn.Module(), graph)


def _swap(body: GraphModule, old: Any, new: Any, *args: Any) -> None:
    """Edits a graph in place, with as many nodes as before."""
    for node in body.graph.find_nodes(op="call_function", target=old):
        node.target, node.args = new, (node.args[0], *args)
    body.recompile()


# What is read -------------------------------------------------------------------------------------------------------


IN_PLACE = sorted({getattr(operator, name) for name in dir(operator) if name.startswith("__i")}, key=str)


@pytest.mark.parametrize("function", [one for one in IN_PLACE if one.__name__.startswith("i")], ids=str)
def test_only_what_python_does_in_place_counts_as_writing(function: Any) -> None:
    plain = function in (operator.index, operator.inv, operator.invert)
    assert bool(_plan(_body(function, 1)).mutating) is not plain


def _plan(body: GraphModule) -> CheckpointPlan:
    found = plan_of_body(body)
    assert found is not None
    return found


@every_operator
def test_a_body_that_adds_in_place_is_recomputed_on_copies(operator: Any) -> None:
    body, leaf = _body(ADD_IN_PLACE, 1), torch.ones(3, requires_grad=True)
    assert_bitwise(
        step(lambda: operator(body, leaf * 2), [leaf]),
        step(lambda: body(leaf * 2), [leaf]),
    )


def test_a_buffer_that_counts_in_place_counts_once() -> None:
    root = nn.Module()
    root.register_buffer("count", torch.zeros(()))
    graph = Graph()
    x = graph.placeholder("x")
    count = graph.call_function(operator.iadd, (graph.get_attr("count"), 1))
    graph.output(graph.call_function(ATEN.sin.default, (graph.call_function(ATEN.mul.Tensor, (x, count)),)))
    body, leaf = GraphModule(root, graph), torch.ones(3, requires_grad=True)
    (found,) = torch.autograd.grad(recompute.wrap_activation_checkpoint(body, leaf).sum(), leaf)
    assert torch.equal(found, torch.cos(torch.ones(3)))
    assert body.count == 1


def test_methods_and_functions_that_only_compute_write_and_draw_nothing() -> None:
    assert plan_of_body(symbolic_trace(lambda x: x.sin().exp() + torch.tanh(x).neg())) == NOTHING
    assert plan_of_body(make_fx(lambda x: x.sin().exp() + torch.tanh(x))(torch.ones(3))) == NOTHING


@pytest.mark.parametrize(
    ("function", "mutating"),
    [
        (lambda x: x.sin_(), ("sin_",)),
        (lambda x: torch.sin(x, out=x), ("sin",)),
        (lambda x: torch.sort(x, out=(x, x))[0], ("sort",)),
        (lambda x: ATEN.sin.out(x, out=x), ("sin_out",)),
        (lambda x: ATEN.topk(x, 2, values=x, indices=x)[0], ("topk",)),
        (lambda x: ATEN.topk.values(x, 2, values=x, indices=x)[0], ("topk_values",)),
        (lambda x: torch.sin(x, out=None), ()),
    ],
)
def test_overloads_that_write_into_what_they_are_given_count_if_it_is_given(function: Any, mutating: Any) -> None:
    assert _plan(symbolic_trace(function)).mutating == mutating


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: x.bernoulli(0.5),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: torch.ops.partita_test.untagged_noise(x),
    ],
)
def test_the_rng_state_is_preserved_where_an_operator_may_use_it(function: Any) -> None:
    assert _plan(symbolic_trace(function)).preserves_rng


@torch.library.custom_op("partita_test::untagged_noise", mutates_args=())
def _untagged_noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * torch.ops.partita_test.untagged_noise(x.detach()))


def test_a_custom_operator_without_the_tag_generates_the_same_numbers_again() -> None:
    _untagged_noise.register_fake(torch.empty_like)
    model, x = nn.Sequential(_Noisy(), _Noisy()), torch.randn(3, 4)
    program = partita.capture(model, (x,))
    module = partita.plan(program, BySize(parts=2), Recompute()).apply().module()

    def gradients(function: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(function(x).sum(), tuple(model.parameters())))

    assert_bitwise(gradients(module), gradients(model))


def test_the_input_of_a_symbolic_trace_that_writes_nothing_is_not_copied() -> None:
    body = symbolic_trace(lambda x, w: (x * w).sum().sin())
    with Counted() as counted:
        recompute.wrap_activation_checkpoint(body, torch.ones(3), torch.ones(3, requires_grad=True))
    assert not counted.calls["clone"] + counted.calls["equal"]


def test_a_call_of_an_unknown_module_may_do_anything() -> None:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    root, graph = nn.Module(), Graph()
    root.layer = Unknown()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    found = _plan(GraphModule(root, graph))
    assert (found.mutating, found.preserves_rng) == (("layer",), True)


# Edits --------------------------------------------------------------------------------------------------------------


def _gradient(function: Callable[..., Any]) -> Tensor:
    leaf = torch.ones(8, requires_grad=True)
    torch.manual_seed(0)
    (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return found


def _computes(x: Tensor) -> Tensor:
    return torch.relu(x.sin()).cos()


def _drops(x: Tensor) -> Tensor:
    return torch.dropout(x.sin(), 0.5, True).cos()


def test_a_body_by_hand_may_be_edited_between_calls() -> None:
    body = make_fx(_computes)(torch.ones(8))
    _gradient(lambda x: recompute.wrap_activation_checkpoint(body, x))
    assert plan_of_body(body) == NOTHING
    _swap(body, ATEN.relu.default, ATEN.dropout.default, 0.5, True)
    assert torch.equal(_gradient(lambda x: recompute.wrap_activation_checkpoint(body, x)), _gradient(_drops))


@pytest.mark.parametrize("is_called_before", [False, True])
def test_a_body_of_an_applied_plan_may_be_edited(is_called_before: bool) -> None:
    program = partita.capture(_computes, (torch.ones(8),))
    module = partita.plan(program, BySize(parts=1), Recompute()).apply().module()
    if is_called_before:
        assert torch.equal(_gradient(module), _gradient(_computes))
    (body,) = _noted(module)
    _swap(body, ATEN.relu.default, ATEN.dropout.default, 0.5, True)
    assert torch.equal(_gradient(module), _gradient(_drops))


def test_an_edit_inside_of_an_inner_body_is_seen() -> None:
    inner = make_fx(_computes)(torch.ones(8))
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(recompute.keep, (graph.get_attr("inner"), x)))
    root = nn.Module()
    root.inner = inner
    body = GraphModule(root, graph)
    assert plan_of_body(body) == NOTHING
    _swap(inner, ATEN.relu.default, ATEN.dropout.default, 0.5, True)
    assert _plan(body).preserves_rng
    body.inner = make_fx(_computes)(torch.ones(8))
    assert plan_of_body(body) == NOTHING


def test_what_was_noted_goes_with_an_edit_and_comes_back_with_its_undoing() -> None:
    body, noted = _body(ATEN.add.Tensor, 1), CheckpointPlan((), preserves_rng=True, mutated_inputs=(0,))
    annotate_plan(body, noted)
    assert plan_of_body(body) == noted
    _swap(body, ATEN.add.Tensor, ATEN.add.Tensor, 2)
    assert plan_of_body(body) == NOTHING
    _swap(body, ATEN.add.Tensor, ATEN.add.Tensor, 1)
    assert plan_of_body(body) == noted


def test_a_body_that_is_not_edited_is_looked_at_once() -> None:
    body = _body(ATEN.add.Tensor, 1)
    assert plan_of_body(body) is plan_of_body(body)


# Copies, pickles and rewrites -----------------------------------------------------------------------------------------


class _WrittenLater(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        hidden = x * 2
        result = (hidden * w).sin()
        hidden.mul_(3)
        return result + hidden


def _noted(module: nn.Module) -> list[GraphModule]:
    """The bodies of an applied plan of which something was noted."""
    return [
        one for one in module.modules() if isinstance(one, GraphModule) and "partita_annotation_checkpoint" in one.meta
    ]


def _of_label(node: Node) -> str | None:
    return "region" if node.name in ("mul_1", "sin") else None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_copies_and_pickles_know_what_is_written_later(copied: Any, is_called_before: bool) -> None:
    program = Program.of(symbolic_trace(_WrittenLater()))
    module = partita.plan(program, ByLabel(_of_label), Recompute()).apply().module()
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    expected = torch.autograd.grad((w * 2).sin().sum(), w)
    if is_called_before:
        assert_bitwise(torch.autograd.grad(module(x, w).sum(), w), expected)
    again = copied(module)
    assert_bitwise(torch.autograd.grad(again(x, w).sum(), w), expected)
    assert list(map(plan_of_body, _noted(again))) == list(map(plan_of_body, _noted(module)))


def test_a_rewrite_of_modes_in_a_body_carries_what_is_known() -> None:
    program = partita.capture(Buffered(), (torch.randn(4, 6),))
    module = partita.plan(program, BySize(parts=3), Recompute()).apply().module()
    found = list(map(plan_of_body, _noted(module)))
    assert found
    assert all(facts is not None and facts.is_complete for facts in found)
