"""Views that a lowered region gives: they are what the body's own would be, whatever it does with lists and sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lowering.helpers import Counting, lowered, plan_of
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from partita import Program, capture, plan, verify
from partita.policies import ByLabel
from partita.treatments import Lower

aten = torch.ops.aten


def check(write: Callable[[Graph, Node], object], *arguments: Tensor) -> Counting:
    """Verifies that a graph means the same when it is lowered as a whole; gives what has compiled it."""
    graph, backend = Graph(), Counting()
    inputs = [graph.placeholder(f"x{place}") for place in range(len(arguments))]
    graph.output(write(graph, *inputs))
    program = Program.of(GraphModule({}, graph))
    plan = plan_of(program, Lower(backend))
    verify(program, plan.apply(), arguments)
    assert not plan.failures
    return backend


def halves(graph: Graph, x: Node) -> Node:
    """A list of two views; torch's overloads give lists, which can be changed, its functions tuples."""
    return graph.call_function(aten.chunk.default, (x, 2))


def item(graph: Graph, items: Node, place: int) -> Node:
    return graph.call_function(operator.getitem, (items, place))


def replaced(graph: Graph, x: Node) -> list[Node]:
    """What was an item before, and what is one after it was replaced."""
    items = halves(graph, x)
    first = item(graph, items, 0)
    graph.call_function(operator.setitem, (items, 0, graph.call_function(torch.sin, (x,))))
    return [first, item(graph, items, 0), item(graph, items, 1)]


def popped(graph: Graph, x: Node) -> Node:
    items = halves(graph, x)
    graph.call_method("pop", (items, 0))
    return item(graph, items, 0)


def appended(graph: Graph, x: Node) -> Node:
    """The input itself out of a list, and a view of it."""
    items = halves(graph, x)
    graph.call_method("append", (items, x))
    return graph.call_method("view", (item(graph, items, -1), -1))


def put_together(graph: Graph, x: Node) -> list[Node]:
    """A list that got the items of another, by both of its names."""
    items, others = halves(graph, x), graph.call_function(aten.unbind.int, (x, 0))
    both = graph.call_function(operator.iadd, (items, others))
    return [item(graph, both, -1), item(graph, items, 2)]


def returned_whole(graph: Graph, x: Node) -> Node:
    items = halves(graph, x)
    graph.call_function(operator.setitem, (items, 0, graph.call_method("t", (x,))))
    return items


@pytest.mark.parametrize("write", [replaced, popped, appended, put_together, returned_whole])
def test_views_out_of_a_list_that_was_changed(write: Callable[[Graph, Node], Any]) -> None:
    check(write, torch.randn(4, 6, requires_grad=True))


def test_a_random_operator_that_only_goes_into_a_list_runs() -> None:
    def write(graph: Graph, x: Node) -> Node:
        items = halves(graph, graph.call_function(torch.bernoulli, (graph.call_function(torch.sigmoid, (x,)),)))
        graph.call_method("append", (items, graph.call_function(torch.sin, (x,))))
        return item(graph, items, -1)

    check(write, torch.randn(4, 6, requires_grad=True))


def test_a_view_by_the_size_of_what_was_computed() -> None:
    def write(graph: Graph, x: Node) -> Node:
        size = graph.call_method("size", (graph.call_function(torch.sin, (x,)),))
        return graph.call_method("view", (graph.call_method("view", (x, -1)), size))

    assert not check(write, torch.randn(4, 6, requires_grad=True)).made, "views need no compiler"


def test_a_view_by_the_open_size_of_what_was_computed() -> None:
    def write(x: Tensor) -> Tensor:
        return x.view(-1).view(torch.sin(x).size())

    backend = Counting()
    plan = plan_of(write, Lower(backend, dynamic=True))
    module = plan.apply().module()
    for rows in (4, 5):
        x = torch.randn(rows, 6, requires_grad=True)
        found = module(x)
        assert (found.shape, found.data_ptr()) == (x.shape, x.data_ptr())
        assert torch.equal(*torch.autograd.grad(found.sum(), x), torch.ones_like(x))
    assert len(backend.made) == 1
    assert not plan.failures


@pytest.mark.parametrize("expand", [(4, 6), (-1, -1), (1, 4, 6)])
def test_a_write_through_a_view_that_was_expanded_to_nothing_more_keeps_the_bits(expand: tuple[int, ...]) -> None:
    def write(graph: Graph, x: Node) -> Node:
        view = graph.call_method("expand", (x, *expand))
        graph.call_method("mul_", (view, 0.3))
        return x

    check(write, torch.randn(4, 6))
    check(write, -torch.zeros(4, 6))


def turned(x: Tensor) -> Tensor:
    view = x[:]
    view.t_()
    return view


def turned_back(x: Tensor) -> list[Tensor]:
    """A view of what was turned for a while, and a view from before."""
    view = x[:]
    before = view[0]
    view.t_()
    column = view[0]
    view.t_()
    return [before, column, view]


def turned_in_a_list(x: Tensor) -> list[Tensor]:
    first, second = x.chunk(2)
    first.t_()
    return [first, second, second[0]]


def turned_input(x: Tensor) -> list[Tensor]:
    row = x[0]
    x.t_()
    return [row, x[0], x]


def turned_and_written(x: Tensor) -> Tensor:
    view = x.detach()
    view.t_().add_(1)
    return view


def turned_twice_shown(x: Tensor) -> list[Tensor]:
    """Two outputs of one memory that no input holds."""
    made = torch.sin(x)
    view = made[1:]
    view.transpose_(0, 1)
    return [made, view, view[0]]


RESHAPED: list[Callable[[Tensor], Any]] = [
    turned,
    turned_back,
    turned_in_a_list,
    turned_input,
    turned_and_written,
    turned_twice_shown,
    lambda x: x[0].unsqueeze_(0),
    lambda x: x[:1].squeeze_(),
    lambda x: x[:].swapaxes_(0, 1),
    lambda x: x[:].as_strided_((2,), (3,)),
]


@pytest.mark.parametrize("function", RESHAPED)
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_view_whose_shape_was_changed_in_place_has_the_new_one(
    function: Callable[[Tensor], Any], is_captured: bool
) -> None:
    x = torch.arange(24.0).reshape(4, 6)
    program = capture(function, (x.clone(),)) if is_captured else Program.of(symbolic_trace(function))
    plan = plan_of(program, Lower("eager", strict=True))
    verify(program, plan.apply(), (x,))
    assert not plan.failures


def given_other_memory(x: Tensor) -> list[Tensor]:
    made, other = x * 2, x * 3
    made.set_(other)
    return [made, other]


def shrunk(x: Tensor) -> list[Tensor]:
    made = x * 2
    view = made.view(-1)
    made.resize_as_(x[:2])
    return [made.add_(1), view]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("function", [given_other_memory, shrunk])
def test_tensors_that_share_memory_by_another_way_than_views_share_it_still(
    function: Callable[[Tensor], Any], is_captured: bool, backend: str
) -> None:
    x = torch.arange(24.0).reshape(4, 6)
    program = capture(function, (x,)) if is_captured else Program.of(symbolic_trace(function))
    lowered_plan = plan_of(program, Lower(backend))
    verify(program, lowered_plan.apply(), (x,))
    made, other = lowered_plan.apply().module()(x)
    made.fill_(7)
    assert other.flatten()[: made.numel()].tolist() == [7] * made.numel()


def test_a_region_that_gives_a_tensor_other_memory_runs_eagerly() -> None:
    plan = plan_of(given_other_memory, Lower("eager"))
    plan.apply().module()(torch.ones(3))
    (failure,) = plan.failures
    assert failure.reason == "'set_' gives a tensor other memory, which compiled code would not do"


def test_a_view_whose_shape_was_changed_by_an_open_size_has_the_new_one() -> None:
    module = plan_of(turned, Lower("eager", dynamic=True)).apply().module()
    for rows in (4, 5):
        x = torch.randn(rows, 6)
        assert module(x).stride() == (1, 6)
        assert torch.equal(module(x), x.t())


def masked(x: Tensor) -> tuple[Tensor, Tensor]:
    filled = x.masked_fill_(x > 0, 0.5)
    return filled.sigmoid(), filled.sigmoid().mean()


def summed(x: Tensor) -> Tensor:
    return (x + 1).cumsum_(0)


def scattered(x: Tensor) -> Tensor:
    return torch.ops.aten.index_add_.default(x * 2, 0, torch.tensor([1]), x[:1])


def through_a_view(x: Tensor) -> Tensor:
    result = x.t() * 2
    result.t().tril_()
    return result


@pytest.mark.parametrize("function", [masked, summed, scattered, through_a_view])
def test_a_mutation_keeps_the_strides_although_compiled_code_mutates_nothing(function: Callable[..., Any]) -> None:
    program, x = Program.of(symbolic_trace(function)), torch.linspace(-1, 1, 16).reshape(4, 4).t()
    plan = plan_of(program, Lower("aot_eager"))
    verify(program, plan.apply(), (x,))
    assert not plan.failures


def test_a_view_that_a_region_without_gradients_gives_can_be_mutated_by_what_has_some() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        row = torch.stack([x, x])[0]
        return row.mul_(y)

    program = Program.of(symbolic_trace(function))
    policy = ByLabel(lambda node: None if node.name == "mul_" else "region")
    verify(
        program, plan(program, policy, Lower("aot_eager")).apply(), (torch.ones(3), torch.ones(3, requires_grad=True))
    )


def test_an_input_whose_gradient_function_autograd_refuses_raises_in_later_calls_too() -> None:
    module = lowered(lambda x: (x > 0, x + 1)[0], Lower("aot_eager"))
    base = torch.ones(3, requires_grad=True)
    module(base[:2])
    with torch.no_grad():
        view = base[:2]
        view.detach().mul_(2)
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        module(view)
