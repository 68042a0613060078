"""What users count on when they split a graph: every row of BEHAVIOURS.md about splitting, and the principles behind them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect

import partita
from partita.compat.split_module import split_module, split_module_simple
from partita.errors import CycleError
from partita.policies import ByLabel
from partita.treatments import Call
from tests.split_helpers import (
    CUTS,
    GETITEM,
    Cut,
    Draft,
    ambient,
    by_name,
    crossing_types,
    dump,
    every,
    in_turn,
    operators,
    parts,
    same,
)


@pytest.fixture(params=list(CUTS))
def cut(request: pytest.FixtureRequest) -> Cut:
    return CUTS[request.param]


def x4() -> Tensor:
    return torch.arange(1.0, 5.0)


def runs(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """The result of a call on copies of the arguments, with the arguments as it left them."""
    given = copy.deepcopy((args, kwargs))
    torch.manual_seed(7)
    return module(*given[0], **given[1]), given


def check(module: GraphModule, result: GraphModule, *args: Any, **kwargs: Any) -> None:
    """Two calls of each, from the same state, give the same values, written inputs, state, random state and modes."""
    state = copy.deepcopy(module.state_dict())
    seen = []
    for each in (module, result):
        module.load_state_dict(copy.deepcopy(state))
        before = ambient()
        first = runs(each, *args, **kwargs)
        second = runs(each, *args, **kwargs)
        seen.append((first, second, dict(copy.deepcopy(module.state_dict())), torch.get_rng_state()))
        assert ambient() == before
    assert same(*seen)


# Once per node ---------------------------------------------------------------------------------------------------


def residual() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, a)
    c = draft.call(torch.add, a, b)
    d = draft.call(torch.mul, c, x)
    return draft.done(draft.call(torch.neg, d))


def graded() -> GraphModule:
    """Two operators, three without gradients, two with."""
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.mul, a, 2.0)
    draft.grad(False)
    c = draft.call(torch.exp, b)
    d = draft.call(torch.mul, c, c)
    draft.grad(True)
    e = draft.call(torch.add, d, b)
    f = draft.call(torch.cos, e)
    return draft.done((f, c))


@pytest.mark.parametrize("make", [residual, graded])
def test_the_callback_is_asked_once_per_operator_in_graph_order(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module, asked = make(), []

    def label(node: Node) -> int:
        asked.append(node)
        return len(asked) // 2

    cut(module, label)
    assert asked == operators(module)


def test_a_counter_gives_the_parts_that_asking_once_gives_also_with_a_grad_region(cut: Cut) -> None:
    module = graded()
    result = cut(module, every(3))
    held = [
        [node.name for node in part.graph.nodes if node.op == "call_function" and "grad" not in node.name]
        for part in parts(result).values()
    ]
    assert [len(names) for names in held] == [2, 2, 2]
    check(module, result, x4().requires_grad_())


def test_numbers_and_their_text_are_one_part() -> None:
    module = residual()
    result = split_module(module, None, in_turn([1, "1", 1, "2", 2]))
    assert result.meta["partition_names"] == {"submod_1", "submod_2"}
    check(module, result, x4())


# Names -----------------------------------------------------------------------------------------------------------


class Colliding(nn.Module):
    """Children `a.b` and `a_b`, whose paths joined by underscores are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"b": nn.Linear(4, 4)})
        self.a_b = nn.Linear(4, 4)
        self.a_b_1 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a_b_1(self.a["b"](self.a_b(x)) + self.a["b"](x))


def test_distinct_targets_in_one_part_never_share_a_name(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    check(module, cut(module, lambda node: 0), x4())
    check(module, cut(module, every(2)), x4())


def test_the_qualname_map_is_one_to_one_where_names_collide() -> None:
    module, names = symbolic_trace(Colliding()), {}
    result = split_module(module, None, lambda node: 0, names)
    assert sorted(names.values()) == ["a.b", "a_b", "a_b_1"]
    for new, old in names.items():
        assert result.get_submodule(new) is module.get_submodule(old)


def test_a_module_called_in_two_parts_is_one_module(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    result = cut(module, every(1))
    linears = {id(child) for child in result.modules() if isinstance(child, nn.Linear)}
    assert linears == {id(child) for child in module.modules() if isinstance(child, nn.Linear)}
    check(module, result, x4())


def test_a_placeholder_called_like_a_part_does_not_hide_it(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("submod_0"), draft.input("part_1")
    module = draft.done(draft.call(torch.mul, draft.call(torch.add, x, y), y))
    check(module, cut(module, every(1)), x4(), x4() + 1)


def test_inputs_called_arg_do_not_collide_with_numbered_inputs() -> None:
    draft = Draft()
    one, zero = draft.input("arg_1"), draft.input("arg_0")
    module = draft.done(draft.call(torch.sub, draft.call(torch.mul, one, 2.0), zero))
    result = split_module(module, None, every(1), keep_original_input_name=False)
    assert [node.target for node in result.submod_1.graph.nodes][:2] == ["arg_0", "arg_1"]
    check(module, result, x4(), x4() + 1)


def test_a_second_split_of_a_result_collides_with_no_name(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    once = cut(module, every(2))
    twice = cut(once, every(1))
    check(module, twice, x4())
    check(module, cut(twice, lambda node: 0), x4())
    assert {id(p) for p in twice.parameters()} == {id(p) for p in module.parameters()}


def test_an_attribute_called_like_a_part_stays_reachable(cut: Cut) -> None:
    draft = Draft(submod_0=nn.Linear(4, 4), part_0=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    y = draft.module("submod_0", x)
    z = draft.call(torch.add, y, draft.attr("part_0"))
    module = draft.done(draft.call(torch.relu, z))
    check(module, cut(module, every(1)), x4())


def test_a_parameter_called_like_a_part_stays_reachable(cut: Cut) -> None:
    draft = Draft(submod_0=nn.Parameter(torch.full((4,), 3.0)))
    x = draft.input("x")
    module = draft.done(draft.call(torch.relu, draft.call(torch.add, x, draft.attr("submod_0"))))
    check(module, cut(module, every(1)), x4())


# Order: memory ---------------------------------------------------------------------------------------------------


def refused_or_same(cut: Cut, module: GraphModule, label: Callable[[Node], Any], *args: Any) -> None:
    """Either a result that means the same, or an error that says which parts need each other."""
    before = dump(module)
    try:
        result = cut(module, label)
    except CycleError as error:
        assert "cycle exists between partitions!" in str(error)
        assert dump(module) == before
    else:
        check(module, result, *args)


def test_an_in_place_write_stays_before_a_later_reader_without_a_data_edge(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    draft.method("add_", y, 5.0)
    module = draft.done(draft.call(torch.mul, y, 2.0))
    check(module, cut(module, in_turn([0, 1, 2])), x4())


def test_an_in_place_write_stays_after_an_earlier_reader(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    z = draft.call(torch.mul, y, 2.0)
    w = draft.method("add_", y, 5.0)
    module = draft.done((z, w))
    check(module, cut(module, in_turn([0, 2, 1])), x4())


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 0, 0]])
def test_a_write_to_an_input_keeps_its_place(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.mul, x, 2.0)
    draft.method("add_", x, 1.0)
    module = draft.done((before, draft.call(torch.mul, x, 3.0)))
    refused_or_same(cut, module, in_turn(labels), x4())


VIEWS: dict[str, Callable[[Draft, Node], Node]] = {
    "view": lambda draft, y: draft.method("view", y, 2, 2),
    "getitem": lambda draft, y: draft.call(GETITEM, y, slice(0, 2)),
    "chunk": lambda draft, y: draft.call(GETITEM, draft.call(torch.chunk, y, 2), 0),
    "detach": lambda draft, y: draft.method("detach", y),
    "reshape": lambda draft, y: draft.call(torch.reshape, y, (2, 2)),
    "expand_as": lambda draft, y: draft.method("expand_as", y, y),
    "data": lambda draft, y: draft.call(getattr, y, "data"),
    "T": lambda draft, y: draft.call(getattr, y, "T"),
}
WRITES: dict[str, Callable[[Draft, Node], Node]] = {
    "add_": lambda draft, y: draft.method("add_", y, 5.0),
    "out": lambda draft, y: draft.call(torch.mul, y, 3.0, out=y),
    "relu_": lambda draft, y: draft.call(torch.nn.functional.relu, y, inplace=True),
    "setitem": lambda draft, y: draft.call(__import__("operator").setitem, y, 0, 9.0),
    "iadd": lambda draft, y: draft.call(__import__("operator").iadd, y, 9.0),
    "zero_": lambda draft, y: draft.call(torch.zero_, y),
    "aten": lambda draft, y: draft.call(torch.ops.aten.mul_.Tensor, y, 3.0),
    "foreach": lambda draft, y: draft.call(torch._foreach_add_, [y], 1.0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_is_seen_by_later_readers_of_the_base(view: str, write: str) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.sub, x, 3.0)
    early = draft.call(torch.mul, y, 2.0)
    WRITES[write](draft, VIEWS[view](draft, y))
    late = draft.call(torch.mul, y, 10.0)
    module = draft.done((early, late, y))
    count = len(operators(module))
    for cut in CUTS.values():
        check(module, cut(module, in_turn(range(count))), x4())
        check(module, cut(module, in_turn(range(count, 0, -1))), x4())
        refused_or_same(cut, module, lambda node: len(node.name) % 2, x4())


@pytest.mark.parametrize("labels", [[0, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
def test_interleaved_parts_around_a_write_are_ordered_or_refused(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x, z = draft.input("x"), draft.input("z")
    y = draft.call(torch.mul, x, 1.0)
    draft.method("add_", y, z)
    module = draft.done((draft.call(torch.mul, y, 2.0), y))
    refused_or_same(cut, module, in_turn(labels), x4(), x4())


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [0, 1, 1], [1, 0, 2], [0, 1, 0]])
def test_a_buffer_update_and_a_later_read_keep_their_order(cut: Cut, labels: list[int]) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    early = draft.call(torch.add, x, draft.attr("count"))
    draft.method("add_", draft.attr("count"), 1.0)
    module = draft.done((early, draft.call(torch.add, x, draft.attr("count"))))
    refused_or_same(cut, module, in_turn(labels), x4())


def test_a_batch_norm_and_a_read_of_its_running_mean_keep_their_order(cut: Cut) -> None:
    draft = Draft(norm=nn.BatchNorm1d(3))
    x = draft.input("x")
    early = draft.call(torch.mul, draft.attr("norm.running_mean"), 2.0)
    y = draft.module("norm", x)
    late = draft.call(torch.mul, draft.attr("norm.running_mean"), 3.0)
    module = draft.done((early, y, late))
    for labels in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        check(module, cut(module, in_turn(labels)), torch.randn(5, 3))


def test_two_names_of_one_buffer_are_one_memory(cut: Cut) -> None:
    shared = torch.zeros(4)
    draft = Draft(one=shared, other=shared)
    x = draft.input("x")
    draft.method("add_", draft.attr("one"), x)
    module = draft.done(draft.call(torch.mul, draft.attr("other"), 2.0))
    for labels in ([0, 1], [1, 0]):
        check(module, cut(module, in_turn(labels)), x4())


def test_two_inputs_may_be_one_tensor(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("x"), draft.input("y")
    draft.method("add_", x, 1.0)
    module = draft.done(draft.call(torch.mul, y, 2.0))
    for labels in ([0, 1], [1, 0]):
        expected, tensor = x4(), x4()
        wanted = module(expected, expected)
        assert torch.equal(cut(module, in_turn(labels))(tensor, tensor), wanted)


def test_an_output_that_is_a_written_input_is_the_input_itself(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.method("add_", x, 1.0)
    draft.method("mul_", x, 2.0)
    module = draft.done((y, x))
    tensor = x4()
    first, second = cut(module, every(1))(tensor)
    assert first is second is tensor


# Order: random numbers and side effects ------------------------------------------------------------------------------


DRAWS: dict[str, Callable[[Draft, Node], Node]] = {
    "rand_like": lambda draft, x: draft.call(torch.rand_like, x),
    "dropout": lambda draft, x: draft.call(torch.nn.functional.dropout, x, 0.5),
    "module": lambda draft, x: draft.module("drop", x),
    "rand": lambda draft, x: draft.call(torch.rand, 4),
    "normal_": lambda draft, x: draft.method("normal_", draft.method("clone", x)),
    "aten": lambda draft, x: draft.call(torch.ops.aten.bernoulli.p, x, 0.5),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", ["rand_like", "module", "aten"])
def test_random_operators_draw_in_their_original_order(first: str, second: str) -> None:
    draft = Draft(drop=nn.Dropout(0.5))
    x = draft.input("x")
    draws = [DRAWS[kind](draft, x) for kind in (first, second, first)]
    module = draft.done(tuple(draws))
    count = len(operators(module))
    for cut in CUTS.values():
        check(module, cut(module, in_turn(range(count))), x4())
        check(module, cut(module, in_turn(range(count, 0, -1))), x4())
        refused_or_same(cut, module, in_turn([0, 1, 0, 1, 0]), x4())


HAPPENED: list[str] = []


@has_side_effect
def note(text: str, x: Any = None) -> None:
    HAPPENED.append(text)


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 1, 0]])
def test_side_effects_keep_their_order(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x = draft.input("x")
    for text in "abc":
        draft.call(note, text)
    module = draft.done(x)
    try:
        result = cut(module, in_turn(labels))
    except CycleError:
        assert labels == [0, 1, 0]
        return
    HAPPENED.clear()
    result(x4())
    assert HAPPENED == ["a", "b", "c"]


def unknown(x: Tensor) -> Tensor:
    """A plain function that nobody can look into; it writes its argument."""
    return x.add_(1.0)


torch.fx.wrap("unknown")


def test_a_function_that_nobody_knows_keeps_its_place(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    early = draft.call(torch.mul, y, 2.0)
    draft.call(unknown, y)
    late = draft.call(torch.mul, y, 3.0)
    module = draft.done((early, late))
    for labels in ([0, 1, 2, 3], [0, 3, 2, 1], [3, 2, 1, 0]):
        check(module, cut(module, in_turn(labels)), x4())


def test_asserts_stay_before_what_comes_after_them_in_their_part(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    ok = draft.call(torch.all, x)
    draft.call(torch._assert, ok, "zeros are not welcome")
    module = draft.done(draft.call(torch.mul, x, 2.0))
    result = cut(module, every(1))
    check(module, result, x4())
    with pytest.raises(AssertionError, match="zeros are not welcome"):
        result(torch.zeros(4))


def test_a_part_with_only_side_effects_survives_dead_code_elimination(cut: Cut) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    y = draft.call(torch.mul, x, 2.0)
    draft.method("add_", draft.attr("count"), 1.0)
    draft.call(note, "kept", y)
    module = draft.done(y)
    result = cut(module, in_turn([0, 1, 2]))
    result.graph.eliminate_dead_code()
    result.recompile()
    HAPPENED.clear()
    before = result(x4())
    assert HAPPENED == ["kept"]
    assert same(before, x4() * 2)
    assert torch.equal(module.count, torch.ones(4))


def test_dead_code_elimination_inside_a_part_keeps_its_writes(cut: Cut) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    draft.call(torch.ops.aten.add_.Tensor, draft.attr("count"), x)
    module = draft.done(draft.call(torch.mul, x, 2.0))
    result = cut(module, in_turn([0, 0]))
    for part in parts(result).values():
        part.graph.eliminate_dead_code()
        part.recompile()
    check(module, result, x4())


# Modes -----------------------------------------------------------------------------------------------------------


def test_a_grad_region_never_reaches_a_part_that_had_no_toggle_before_it(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.mul, x, 2.0)
    draft.grad(False)
    inside = draft.call(torch.mul, x, 3.0)
    draft.grad(True)
    module = draft.done((before, inside, draft.call(torch.mul, x, 4.0)))
    for labels in ([0, 1, 1, 2, 2], [2, 1, 1, 0, 0], [0, 1, 1, 1, 0], [5, 5, 1, 1, 3], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]):
        result = cut(module, in_turn(labels))
        check(module, result, x4().requires_grad_())
        assert [out.requires_grad for out in result(x4().requires_grad_())] == [True, False, True]


@pytest.mark.parametrize("outer", [True, False])
def test_a_part_called_alone_leaves_the_ambient_modes_alone(cut: Cut, outer: bool) -> None:
    result = cut(graded(), every(2))
    seen: list[tuple[object, ...]] = []

    class Watching(torch.fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            seen.append(ambient())
            given = super().call_module(target, args, kwargs)
            seen.append(ambient())
            return given

    with torch.set_grad_enabled(outer):
        Watching(result).run(x4().requires_grad_())
        assert set(seen) == {ambient()}


def test_an_affix_works_with_grad_regions() -> None:
    module = graded()
    result = split_module(module, None, every(2), partition_affix="pp")
    assert result.meta["partition_names"] == {f"submod_pp_{part}" for part in range(5)}
    check(module, result, x4().requires_grad_())
    simple = split_module_simple(module, {n: i // 3 for i, n in enumerate(operators(module))}, partition_affix="pp")
    assert set(parts(simple)) == {"submod_pp_0", "submod_pp_1", "submod_pp_2"}
    check(module, simple, x4().requires_grad_())


def autocast_draft() -> GraphModule:
    draft = Draft(weight=nn.Parameter(torch.ones(4, 4)))
    x = draft.input("x")
    weight = draft.attr("weight")
    a = draft.call(torch.matmul, x, weight)
    entered = draft.enter_autocast()
    b = draft.call(torch.matmul, x, weight)
    c = draft.call(torch.matmul, b, weight)
    draft.exit_autocast(entered)
    d = draft.call(torch.matmul, a, weight)
    return draft.done((a, b, c, d))


def test_placeholders_come_first_in_every_part_graph_also_when_a_region_is_re_entered(cut: Cut) -> None:
    for make in (graded, autocast_draft):
        for labels in ([0, 1, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1, 1]):
            module = make()
            result = cut(module, in_turn(labels))
            for part in parts(result).values():
                ops = [node.op for node in part.graph.nodes]
                assert ops == sorted(ops, key=lambda op: op != "placeholder")
                part.graph.lint()
            check(module, result, torch.ones(4, 4))


@pytest.mark.parametrize("labels", [[1, 0, 0, 1, 1, 2], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 2], [3, 2, 2, 2, 1, 0]])
def test_part_ids_need_not_rise_under_autocast(cut: Cut, labels: list[int]) -> None:
    refused_or_same(cut, autocast_draft(), in_turn(labels), torch.ones(4, 4))


def test_ids_one_then_zero_are_handled_under_autocast(cut: Cut) -> None:
    module = autocast_draft()
    check(module, cut(module, in_turn([1, 1, 0, 0, 0, 1])), torch.ones(4, 4))


def inferring() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.mul, x, 2.0)
    entered = draft.enter_inference()
    b = draft.call(torch.mul, x, 3.0)
    c = draft.call(torch.mul, b, 3.0)
    draft.exit_inference(entered)
    d = draft.call(torch.mul, a, 4.0)
    return draft.done((a, b, c, d))


@pytest.mark.parametrize("labels", [[0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 1]])
def test_inference_mode_is_a_region_that_no_part_leaks(cut: Cut, labels: list[int]) -> None:
    module = inferring()
    result = cut(module, in_turn(labels))
    check(module, result, x4().requires_grad_())
    assert [out.is_inference() for out in result(x4())] == [out.is_inference() for out in module(x4())]
    for part in parts(result).values():
        inputs = sum(node.op == "placeholder" for node in part.graph.nodes)
        with torch.inference_mode():
            found = ambient()
            part(*[x4()] * inputs)
            assert ambient() == found
        found = ambient()
        part(*[x4()] * inputs)
        assert ambient() == found


def nested_modes() -> GraphModule:
    """Grad off in autocast in inference, each left in another order than it was entered."""
    draft = Draft(weight=nn.Parameter(torch.ones(4, 4)))
    x = draft.input("x")
    weight = draft.attr("weight")
    entered = draft.enter_autocast()
    a = draft.call(torch.matmul, x, weight)
    draft.grad(False)
    b = draft.call(torch.matmul, x, weight)
    off = draft.enter_autocast(None, False)
    c = draft.call(torch.matmul, x, weight)
    draft.grad(True)
    d = draft.call(torch.matmul, x, weight)
    draft.exit_autocast(off)
    e = draft.call(torch.matmul, x, weight)
    inference = draft.enter_inference()
    f = draft.call(torch.matmul, x, weight)
    again = draft.enter_autocast(torch.float16)
    g = draft.call(torch.matmul, x, weight)
    draft.exit_autocast(again)
    draft.exit_inference(inference)
    draft.exit_autocast(entered)
    h = draft.call(torch.matmul, x, weight)
    return draft.done((a, b, c, d, e, f, g, h))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize("parted", ["run", "turn"])
def test_nested_modes_mean_the_same_however_they_are_cut(cut: Cut, step: int, parted: str) -> None:
    module = nested_modes()
    count = len(operators(module))
    labels = [at // step if parted == "run" else at % step for at in range(count)]
    result = cut(module, in_turn(labels))
    check(module, result, torch.ones(4, 4))
    with torch.no_grad():
        check(module, result, torch.ones(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        check(module, result, torch.ones(4, 4))


def test_gradients_flow_as_before_through_a_split_grad_region(cut: Cut) -> None:
    for labels in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1, 1, 1]):
        module = graded()
        grads = []
        for each in (module, cut(module, in_turn(labels))):
            x = x4().requires_grad_()
            each(x)[0].sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_modes_that_are_never_left_are_left_behind_as_by_the_original(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.mul, x, 2.0)
    draft.grad(False)
    module = draft.done((a, draft.call(torch.mul, x, 3.0)))
    for labels in ([0, 1, 1], [0, 0, 1], [0, 1, 2], [1, 0, 0]):
        result = cut(module, in_turn(labels))
        with torch.enable_grad():
            out = result(x4().requires_grad_())
            left_behind = torch.is_grad_enabled()
        assert [tensor.requires_grad for tensor in out] == [True, False]
        assert left_behind is False


def test_an_autocast_that_is_never_left_is_handled_or_named(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    draft.enter_autocast()
    module = draft.done(draft.call(torch.matmul, x, x))
    found = ambient()
    try:
        result = cut(module, every(1))
    except partita.errors.ModeError as error:
        assert "_enter_autocast" in str(error)
        return
    try:
        assert result(torch.ones(2, 2)).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cpu", found[2])
        torch.set_autocast_dtype("cpu", found[3])
        torch.set_autocast_cache_enabled(found[4])
        torch.autocast_decrement_nesting()


def test_modes_are_put_back_when_a_part_raises_halfway(cut: Cut) -> None:
    for make in (graded, nested_modes):
        module = make()
        bad = operators(module)[-3]
        bad.graph.inserting_before(bad)
        with module.graph.inserting_before(bad):
            module.graph.call_function(torch.ones(3).view, (7,))
        module.recompile()
        for step in (1, 2, 4, 100):
            result = cut(module, every(step))
            found = ambient()
            with pytest.raises(RuntimeError, match="shape"):
                result(torch.ones(4, 4))
            assert ambient() == found


def test_a_module_with_modes_runs_again_after_it_raised(cut: Cut) -> None:
    module = graded()
    result = cut(module, every(2))
    with pytest.raises(TypeError):
        result("not a tensor")
    check(module, result, x4().requires_grad_())


def test_a_part_of_nothing_but_toggles_is_harmless(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    draft.grad(False)
    y = draft.call(torch.mul, x, 2.0)
    draft.grad(True)
    module = draft.done(y)
    check(module, cut(module, in_turn(["off", "compute", "on"])), x4().requires_grad_())
