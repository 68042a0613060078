"""What crosses the border of a part: symbolic sizes, items of containers, and values that compilers accept."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import CUTS, GETITEM, Cut, Draft, crossing_types, every, in_turn, operators, parts, same
from tests.compat.split_models import (
    Reshaping,
    Sizes,
    check,
    dynamo_graph,
    exported,
    refused_or_same,
    reshaping,
    sizes,
    x4,
)
from torch import Tensor, nn
from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass as torch_pass
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module as torch_split

import partita
from partita.compat.split_module import split_module
from partita.policies import ByLabel
from partita.treatments import Call

# Symbols ---------------------------------------------------------------------------------------------------------


@cache
def unbacked() -> GraphModule:
    return exported(Unbacked(), torch.ones(4))


def with_sizes(module: GraphModule, x: Tensor) -> list[Any]:
    """The arguments of a captured graph: Dynamo's take the symbolic size before the tensor."""
    return [x.shape[0], x][-len(module.graph.find_nodes(op="placeholder")) :]


def test_a_symbolic_size_without_an_input_for_it_splits(cut: Cut) -> None:
    module = reshaping()
    assert not any(isinstance(n.meta.get("val"), torch.SymInt) for n in module.graph.find_nodes(op="placeholder"))
    for step in (1, 2, 3, 100):
        result = cut(module, every(step))
        check(module, result, torch.randn(6, 4))
        check(module, result, torch.randn(3, 4))


def free_symbols_of(value: Any) -> set[str]:
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return {str(symbol) for symbol in free_symbols(value)}


def bound_symbols(part: GraphModule) -> tuple[set[str], set[str]]:
    """The symbols that the inputs of a part mention, and those that an input gives as a number."""
    mentioned, given = set(), set()
    for node in part.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor | torch.SymInt):
            mentioned |= free_symbols_of(value)
        if isinstance(value, torch.SymInt):
            given |= free_symbols_of(value)
    return mentioned, given


def test_every_symbol_that_the_inputs_of_a_part_mention_is_an_input_of_it(cut: Cut) -> None:
    for module in (reshaping(), dynamo_graph(Reshaping(), torch.randn(6, 4))):
        for step in (1, 2, 3):
            for part in parts(cut(module, every(step))).values():
                mentioned, given = bound_symbols(part)
                assert mentioned == given


def test_val_symbols_cross_exactly_as_example_value_symbols_do(cut: Cut) -> None:
    module = dynamo_graph(Reshaping(), torch.randn(6, 4))
    renamed = copy.deepcopy(module)
    for node in renamed.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta.pop("example_value")
    count = len(operators(module))
    for step in (1, 2, 3):
        labels = [at // step for at in range(count)]
        one, other = cut(module, in_turn(labels)), cut(renamed, in_turn(labels))
        assert one.code == other.code
        assert [part.code for part in parts(one).values()] == [part.code for part in parts(other).values()]


def test_a_part_that_computes_a_size_itself_does_not_become_its_own_input(cut: Cut) -> None:
    module = dynamo_graph(lambda x: (x + 1).view(x.size(0) * 4).sin().view(x.size(0), 4), torch.randn(6, 4))
    for labels in ([0], [0, 0, 1], [0, 1], [0, 1, 1, 0]):
        refused_or_same(cut, module, in_turn(labels), *with_sizes(module, torch.randn(6, 4)))


def test_a_size_that_one_part_computes_from_its_own_value_stays_there(cut: Cut) -> None:
    module = make_fx(lambda x: (x * 2).reshape(x.shape[0] * 3).cos(), tracing_mode="symbolic")(torch.randn(5, 3))
    for step in (1, 2, 3, 100):
        result = cut(module, every(step))
        check(module, result, torch.randn(5, 3))
        check(module, result, torch.randn(7, 3))


class Unbacked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        u = x.sum().to(torch.int64).item()
        torch._check(u >= 2)
        torch._check(u <= 100)
        y = torch.ones(u) * 2
        return (y.sin() + y.numel()).cos()


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_unbacked_symbols_cross_from_the_part_that_binds_them(cut: Cut, step: int) -> None:
    module = unbacked()
    result = cut(module, every(step))
    check(module, result, torch.ones(4))
    check(module, result, torch.ones(4) * 2)
    for part in parts(result).values():
        mentioned, given = bound_symbols(part)
        assert mentioned == given


def test_unbacked_sizes_of_nonzero_cross(cut: Cut) -> None:
    class Nonzero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = x.nonzero()
            return found.float().sin() * found.shape[0]

    module = exported(Nonzero(), torch.tensor([1.0, 0.0, 2.0]))
    for step in (1, 2, 3):
        result = cut(module, every(step))
        check(module, result, torch.tensor([1.0, 0.0, 2.0]))
        check(module, result, torch.tensor([1.0, 0.0, 0.0]))


def test_a_dynamo_graph_with_symbols_accepts_another_shape(cut: Cut) -> None:
    seen = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        result = cut(module, every(2))
        seen.append(result)
        return result.forward

    torch._dynamo.reset()
    model = Reshaping()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for rows in (6, 3, 9):
        x = torch.randn(rows, 4)
        assert same(compiled(x), model(x))
    assert len(seen) == 1


# What crosses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["dynamo", "export", "make_fx"])
def test_sizes_and_tuples_never_cross_a_border(cut: Cut, capture: str) -> None:
    module, x = sizes(capture), torch.randn(6, 4)
    args = with_sizes(module, x)
    for step in (1, 2, 3):
        result = cut(module, every(step))
        assert crossing_types(result, *args) <= {Tensor, int}
        check(module, result, *args)


def test_a_whole_container_that_is_used_elsewhere_crosses_item_by_item(cut: Cut) -> None:
    class Stacking(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            pieces = x.chunk(2)
            return torch.cat(pieces).sin() * 2, pieces[0] + 1

    module = dynamo_graph(Stacking(), torch.randn(4, 3), dynamic=False)
    result = cut(module, every(1))
    assert crossing_types(result, torch.randn(4, 3)) == {Tensor}
    check(module, result, torch.randn(4, 3))


def test_containers_without_traced_values_still_give_the_same_result(cut: Cut) -> None:
    class Stacking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pieces = x.chunk(2)
            size = x.size()
            return torch.cat([pieces[1], pieces[0]]).reshape(size) + torch.stack(x.split(2)).sum() + x.shape[0]

    module = symbolic_trace(Stacking())
    for step in (1, 2, 3):
        check(module, cut(module, every(step)), torch.randn(4, 3))


def test_an_item_that_is_also_labelled_apart_runs_beside_its_container(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    pieces = draft.call(torch.chunk, x, 2)
    first, second = draft.call(GETITEM, pieces, 0), draft.call(GETITEM, pieces, 1)
    module = draft.done(draft.call(torch.add, first, second))
    result = cut(module, in_turn([0, 1, 2, 1]))
    assert crossing_types(result, x4()) == {Tensor}
    check(module, result, x4())


@pytest.mark.parametrize("cut", [cut for name, cut in CUTS.items() if name != "native"])
def test_a_part_of_items_alone_hands_them_on(cut: Cut) -> None:
    """Stages that are called one after another each have what the next one needs."""
    draft = Draft()
    x = draft.input("x")
    pieces = draft.call(torch.chunk, x, 2)
    first, last = draft.call(GETITEM, pieces, 0), draft.call(GETITEM, pieces, -1)
    module = draft.done(draft.call(torch.add, first, last))
    result = cut(module, in_turn([0, 1, 1, 2]))
    assert crossing_types(result, x4()) == {Tensor}
    check(module, result, x4())
    value: Any = (x4(),)
    for part in parts(result).values():
        value = part(*value)
        value = value if isinstance(value, tuple) else (value,)
    assert same(value[0], module(x4()))


def test_a_part_of_items_alone_of_a_traced_container_takes_only_those(cut: Cut) -> None:
    class Pieces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pieces = x.chunk(4)
            return pieces[1].sin() + pieces[3] + pieces[0]

    module = dynamo_graph(Pieces(), torch.randn(4, 3), dynamic=False)
    places = {"getitem": 1, "getitem_1": 1, "getitem_2": 1, "getitem_3": 2, "chunk": 0}
    taken = {node.name: places.get(node.name, 3) for node in module.graph.nodes}
    result = cut(module, lambda node: taken[node.name])
    check(module, result, torch.randn(4, 3))


def test_items_run_beside_their_container_where_a_stage_of_them_would_be_needed_by_it(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    pieces = draft.call(torch.chunk, x, 2)
    first = draft.call(GETITEM, pieces, 0)
    module = draft.done(draft.call(torch.add, first, 1))
    check(module, cut(module, in_turn([0, 1, 0])), x4())


def compiled_pieces(result: GraphModule, compile_piece: Callable[[GraphModule, list[Any]], Any]) -> GraphModule:
    """A copy of `result` whose parts are compiled with the inputs that their placeholders promise."""
    for name, part in parts(result).items():
        values = [
            node.meta.get("val", node.meta.get("example_value")) for node in part.graph.find_nodes(op="placeholder")
        ]
        setattr(result, name, compile_piece(part, values))
    return result


class Compiled(nn.Module):
    """Compiled code as a module, called as its graph was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return tuple(self.function(*args))


def fake_mode_of(values: list[Any]) -> Any:
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def with_aot(part: GraphModule, values: list[Any]) -> nn.Module:
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(fake_mode_of(values))):
        return Compiled(aot_module_simplified(part, values, fw_compiler=lambda module, inputs: module.forward))


def with_inductor(part: GraphModule, values: list[Any]) -> nn.Module:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode_of(values))):
        return Compiled(compile_fx(part, values))


@pytest.mark.parametrize("capture", ["dynamo", "export"])
def test_pieces_compile_with_aot_autograd(capture: str) -> None:
    module, model = sizes(capture), Sizes()
    for step in (1, 2, 4):
        result = split_module(module, None, every(step), tuple_return=True)
        result = compiled_pieces(result, with_aot)
        for rows in (6, 8):
            x = torch.randn(rows, 4)
            args = with_sizes(module, x)
            assert torch.allclose(result(*args)[0] if capture == "dynamo" else result(*args), model(x), atol=1e-6)


def test_pieces_of_an_exported_graph_with_dynamic_shapes_compile_with_inductor() -> None:
    model = Reshaping()
    program = partita.Program.of(reshaping())
    after = partita.plan(program, ByLabel(every(4)), Call()).apply()
    result = compiled_pieces(after.module(), with_inductor)
    for rows in (6, 9):
        x = torch.randn(rows, 4)
        assert torch.allclose(result(x), model(x), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_of_a_graph_traced_with_gradients_go_through_torchs_passes(count: int) -> None:
    def blocks(x: Tensor) -> Tensor:
        a = x @ x
        with torch.no_grad():
            b = a @ x
            c = b.sin()
        return c @ a

    module = make_fx(blocks, pre_dispatch=True)(torch.randn(3, 3))
    result = split_module(module, None, every(count))
    for part in parts(result).values():
        values = [torch.randn(3, 3, requires_grad=True) for _ in part.graph.find_nodes(op="placeholder")]
        expected = torch.utils._pytree.tree_leaves(part(*values))
        again = torch_split(part, None, lambda node: 0)
        wrapped, _ = torch_pass(copy.deepcopy(part), None)
        for other in (again, wrapped):
            with torch.enable_grad():
                found = torch.utils._pytree.tree_leaves(other(*values))
            assert all(map(torch.equal, found, expected))
            assert [value.requires_grad for value in found] == [value.requires_grad for value in expected]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ambient", [True, False])
def test_a_part_leaves_any_grad_mode_as_it_found_it(ambient: bool, compiled: bool) -> None:
    def blocks(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
            z = y.cos()
        return z + x

    result = split_module(make_fx(blocks, pre_dispatch=True)(x4()), None, every(2))
    torch._dynamo.reset()
    for part in parts(result).values():
        values = [x4() for _ in part.graph.find_nodes(op="placeholder")]
        with torch.set_grad_enabled(ambient):
            (torch.compile(part, backend="eager") if compiled else part)(*values)
            assert torch.is_grad_enabled() is ambient


def test_arguments_inside_slices_dicts_and_lists_are_found(cut: Cut) -> None:
    draft = Draft()
    x, start = draft.input("x"), draft.input("start")
    begin = draft.call(operator.add, start, 1)
    end = draft.call(operator.add, begin, 2)
    piece = draft.call(GETITEM, x, (slice(begin, end), None))
    both = draft.call(torch.cat, tensors=[piece, draft.call(torch.neg, piece)], dim=0)
    module = draft.done({"both": [both], "range": slice(begin, end)})
    for step in (1, 2, 3):
        check(module, cut(module, every(step)), x4(), 0)
