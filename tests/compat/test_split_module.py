"""What users count on when they split a graph: the rows of BEHAVIOURS.md about it, and what stands behind them."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import (
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
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor, nn
from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass as torch_pass
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect
from torch.fx.passes.split_module import split_module as torch_split

import partita
from partita.compat.split_module import split_module, split_module_simple
from partita.errors import CycleError, ModeError
from partita.policies import ByLabel
from partita.treatments import Call


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
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            first = runs(each, *args, **kwargs)
            second = runs(each, *args, **kwargs)
            left_behind = ambient()
        seen.append((first, second, dict(copy.deepcopy(module.state_dict())), torch.get_rng_state(), left_behind))
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


MODE_CUTS = {"off": 0, "a": 0, "b": 1, "on": 1, "enter": 1, "c": 1, "d": 2, "leave": 2, "z": 2}


def switching() -> GraphModule:
    """A no_grad block and an autocast block, each across two parts."""
    graph = Graph()

    def call(name: str, target: Any, *args: Any) -> Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["said"] = name
        return node

    x = graph.placeholder("x")
    call("off", torch._C._set_grad_enabled, False)
    a = call("a", torch.sin, x)
    b = call("b", torch.cos, a)
    call("on", torch._C._set_grad_enabled, True)
    entered = call("enter", _enter_autocast, "cpu", torch.bfloat16, True, None)
    c = call("c", torch.tan, b)
    d = call("d", torch.exp, c)
    call("leave", _exit_autocast, entered)
    graph.output(call("z", torch.exp, d))
    return GraphModule(nn.Module(), graph)


def toggles_in(result: GraphModule) -> list[list[tuple[str, str, Any]]]:
    """The switches of each part that are named as they were, with what they do and what is noted of them."""
    return [
        [(n.name, n.target.__name__, n.meta["said"]) for n in part.graph.nodes if n.name in MODE_CUTS and n.name > "d"]
        for part in parts(result).values()
    ]


def test_mode_switches_keep_their_names_in_the_parts_they_are_given_to() -> None:
    splits = (split_module, torch_split)
    found = [
        toggles_in(split(switching(), None, lambda node: MODE_CUTS[node.name], keep_original_node_name=True))
        for split in splits
    ]
    assert found[0] == found[1]
    result = split_module(switching(), None, lambda node: MODE_CUTS[node.name], keep_original_node_name=True)
    check(switching(), result, x4())


def test_one_part_keeps_all_names_of_its_mode_switches() -> None:
    (part,) = parts(split_module(switching(), None, lambda node: 0, keep_original_node_name=True)).values()
    names = [node.name for node in part.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name in MODE_CUTS] == list(MODE_CUTS)


def test_keeping_the_order_leaves_no_dead_read_of_a_module() -> None:
    draft = Draft(branch=symbolic_trace(lambda x: (x.sin(),)), weight=nn.Parameter(torch.ones(4)))
    x, branch, weight = draft.input("x"), draft.attr("branch"), draft.attr("weight")
    first = draft.call(GETITEM, draft.call(torch.ops.higher_order.cond, True, branch, branch, [x]), 0)
    module = draft.done((draft.call(torch.mul, first, weight), weight))
    result = split_module(module, None, by_name({"mul": 1}), keep_original_order=True)
    assert [node.name for node in result.graph.find_nodes(op="get_attr")] == ["weight"]
    check(module, result, x4())


# Order: memory ---------------------------------------------------------------------------------------------------


def refused_or_same(cut: Cut, module: GraphModule, label: Callable[[Node], Any], *args: Any) -> None:
    """Either a result that means the same, or an error that says which parts need each other."""
    before, refused = dump(module), None
    try:
        check(module, cut(module, label), *args)
    except CycleError as error:
        refused = str(error)
    assert refused is None or "cycle exists between partitions!" in refused
    if refused:
        assert dump(module) == before


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
    "setitem": lambda draft, y: draft.call(operator.setitem, y, 0, 9.0),
    "iadd": lambda draft, y: draft.call(operator.iadd, y, 9.0),
    "zero_": lambda draft, y: draft.call(torch.zero_, y),
    "aten": lambda draft, y: draft.call(torch.ops.aten.mul_.Tensor, y, 3.0),
    "foreach": lambda draft, y: draft.call(torch._foreach_add_, [y], 1.0),
}


# By default every view with one write, and every write with one view.
@pytest.mark.parametrize(
    ("view", "write"),
    slow_but(
        product(VIEWS, WRITES),
        *((view, next(iter(WRITES))) for view in VIEWS),
        *((next(iter(VIEWS)), write) for write in WRITES),
    ),
)
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
    for labels in (
        [0, 1, 1, 2, 2],
        [2, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [5, 5, 1, 1, 3],
        [1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0],
    ):
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
        found = ambient()
        Watching(result).run(x4().requires_grad_())
        assert set(seen) == {found}


def test_an_affix_works_with_grad_regions() -> None:
    module = graded()
    result = split_module(module, None, every(2), partition_affix="pp")
    assert result.meta["partition_names"] == {f"submod_pp_{part}" for part in range(4)}
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
    refused = None
    try:
        result = cut(module, every(1))
    except ModeError as error:
        refused = str(error)
    if refused is not None:
        assert "_enter_autocast" in refused
        return
    try:
        assert result(torch.ones(2, 2)).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cpu", found[2])
        torch.set_autocast_dtype("cpu", found[3])
        torch.set_autocast_cache_enabled(found[4])
        torch.autocast_decrement_nesting()


@has_side_effect
def explode() -> None:
    raise RuntimeError("halfway")


def test_modes_are_put_back_when_a_part_raises_halfway(cut: Cut) -> None:
    for make in (graded, nested_modes):
        module = make()
        with module.graph.inserting_before(operators(module)[-3]):
            module.graph.call_function(explode)
        module.recompile()
        for step in (1, 2, 4, 100):
            result = cut(module, every(step))
            found = ambient()
            with pytest.raises(RuntimeError, match="halfway"):
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


# Symbols ---------------------------------------------------------------------------------------------------------


@cache
def reshaping() -> GraphModule:
    return exported(Reshaping(), torch.randn(6, 4), dynamic=({0: torch.export.Dim("batch")},))


@cache
def unbacked() -> GraphModule:
    return exported(Unbacked(), torch.ones(4))


@cache
def branching() -> GraphModule:
    return exported(Branching(), x4())


@cache
def frozen() -> GraphModule:
    return exported(Frozen(), x4())


@cache
def structured(kind: str) -> GraphModule:
    return exported(Structured(kind), x4(), {"bias": x4() + 1}, scale=x4() + 2)


@cache
def sizes(capture: str) -> GraphModule:
    x = torch.randn(6, 4)
    if capture == "dynamo":
        return dynamo_graph(Sizes(), x)
    if capture == "export":
        return exported(Sizes(), x, dynamic=({0: torch.export.Dim("batch", min=2)},))
    return make_fx(Sizes(), tracing_mode="symbolic")(x)


def exported(model: nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> GraphModule:
    return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False).module()


def dynamo_graph(function: Callable[..., Any], x: Tensor, dynamic: bool = True) -> GraphModule:
    """The one graph that Dynamo hands to a backend, with a symbol for the first size of its input."""
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return found[0]


def with_sizes(module: GraphModule, x: Tensor) -> list[Any]:
    """The arguments of a captured graph: Dynamo's take the symbolic size before the tensor."""
    return [x.shape[0], x][-len(module.graph.find_nodes(op="placeholder")) :]


class Reshaping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.relu() + 1
        z = y.view(x.size(0) * 4)
        w = z.sin().view(x.size(0), 4)
        return w + y


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


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        size = x.size()
        a, b = x.chunk(2, dim=1)
        values, indices = a.max(dim=1)
        return b.reshape(size[0], size[1] // 2).sin() + values.unsqueeze(1) + torch.zeros(size).sum() + indices.sum()


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


# Calling convention and structure ----------------------------------------------------------------------------------


@dataclass
class Answer:
    loss: Tensor
    logits: tuple[Tensor, Tensor]


torch.export.register_dataclass(Answer, serialized_type_name="tests.split.Answer")
Pair = namedtuple("Pair", ["left", "right"])


class Structured(nn.Module):
    """Takes and returns what pytrees are for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: dict[str, Tensor], *, scale: Tensor) -> Any:
        a = self.linear(x) * scale
        b = a + more["bias"]
        if self.kind == "dict":
            return {"b": b, "a": a, "inner": {"x": x}}
        if self.kind == "dataclass":
            return Answer(loss=a.sum(), logits=(a, b))
        if self.kind == "list":
            return [a, [b, None], 3]
        if self.kind == "namedtuple":
            return Pair(a, Pair(b, x))
        if self.kind == "none":
            return None
        return (a, (b, (x, more["bias"])))


KINDS = ["dict", "dataclass", "list", "namedtuple", "tuple"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_module_stays_callable_and_returns_the_same_structure(cut: Cut, kind: str) -> None:
    args, kwargs = (x4(), {"bias": x4() + 1}), {"scale": x4() + 2}
    module = structured(kind)
    for step in (1, 2, 100):
        result = cut(module, every(step))
        check(module, result, *args, **kwargs)
        assert "call_module" in {node.op for node in result.graph.nodes}


def test_the_code_generator_of_the_input_is_not_shared(cut: Cut) -> None:
    module = structured("dict")
    result = cut(module, every(2))
    assert result.graph._codegen is not module.graph._codegen
    assert type(result.graph._codegen) is type(module.graph._codegen)


def test_arguments_by_keyword_and_defaults_reach_a_split_module(cut: Cut) -> None:
    def forward(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor:
        return torch.sin(x * scale) + 1

    module = symbolic_trace(forward)
    result = cut(module, every(1))
    for args, kwargs in [((x4(),), {}), ((), {"x": x4()}), ((x4(),), {"scale": 3.0}), ((x4(), 4.0), {"shift": None})]:
        check(module, result, *args, **kwargs)
    before, after = (list(each.graph.find_nodes(op="placeholder")) for each in (module, result))
    assert [(n.target, n.args, n.type) for n in before] == [(n.target, n.args, n.type) for n in after]


@pytest.mark.parametrize("keep_names", [False, True])
@pytest.mark.parametrize("keep_order", [False, True])
def test_star_arguments_survive(keep_names: bool, keep_order: bool) -> None:
    draft = Draft()
    x, rest, named = draft.input("x"), draft.input("*rest"), draft.input("**named")
    first = draft.call(GETITEM, rest, 0)
    second = draft.call(GETITEM, named, "y")
    module = draft.done(draft.call(torch.mul, draft.call(torch.add, x, first), second))
    result = split_module(module, None, every(1), None, keep_order, keep_names)
    check(module, result, x4(), x4() + 1, y=x4() + 2)


def test_star_arguments_survive_every_cut(cut: Cut) -> None:
    draft = Draft()
    x, rest, named = draft.input("x"), draft.input("*rest"), draft.input("**named")
    total = draft.call(torch.add, x, draft.call(GETITEM, rest, 0))
    module = draft.done(draft.call(torch.mul, total, draft.call(GETITEM, named, "y")))
    check(module, cut(module, in_turn([0, 1, 0, 1])), x4(), x4() + 1, y=x4() + 2)


def test_keeping_node_names_keeps_the_call_signature(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("input"), draft.input("y")
    assert x.name != x.target
    module = draft.done(draft.call(torch.sub, draft.call(torch.sin, x), y))
    result = cut(module, every(1))
    check(module, result, input=x4(), y=x4() + 1)
    kept = split_module(module, None, every(1), keep_original_node_name=True)
    check(module, kept, input=x4(), y=x4() + 1)


@pytest.mark.parametrize("make", [residual, graded, autocast_draft, nested_modes, reshaping])
def test_keeping_node_names_keeps_every_name_also_where_a_region_is_re_entered(make: Callable[[], GraphModule]) -> None:
    module = make()
    for step in (1, 2, 3):
        for order in (False, True):
            result = split_module(module, None, every(step), None, order, True)
            inside = Counter(node.name for part in parts(result).values() for node in operators(part))
            toggles = {
                node.name
                for node in operators(module)
                if any(w in node.name for w in ("grad", "autocast", "inference"))
            }
            wanted = {node.name for node in operators(module)} - toggles
            assert {name for name in wanted if inside[name] != 1} == set()


def test_outputs_that_are_inputs_constants_or_nothing_keep_their_place(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x, _ = draft.input("x"), draft.input("unused")
    weight = draft.attr("weight")
    a = draft.call(torch.add, x, weight)
    b = draft.call(torch.sin, a)
    module = draft.done(
        {"x": x, "none": None, "three": [3, "text", 2.5], "twice": (b, b), "weight": weight, "a": (a, [x])}
    )
    result = cut(module, every(1))
    check(module, result, x4(), x4())
    tensor = x4()
    out = result(tensor, tensor)
    assert out["x"] is tensor
    assert out["weight"] is module.weight
    assert out["twice"][0] is out["twice"][1]


def test_graphs_without_operators_pass_through(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    module = draft.done((x, draft.attr("weight"), None))
    check(module, cut(module, every(1)), x4())
    empty = Draft().done(None)
    assert cut(empty, every(1))() is None


def test_an_operator_without_users_runs_and_stays(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    draft.call(torch.sin, x)
    module = draft.done(draft.call(torch.cos, x))
    result = cut(module, every(1))
    check(module, result, x4())
    assert sum(len(operators(part)) for part in parts(result).values()) == 2


def test_keeping_the_order_works_where_the_first_node_precedes_its_producer(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, x)
    c = draft.call(torch.add, a, b)
    module = draft.done((c, draft.call(torch.mul, b, 2.0)))
    check(module, cut(module, in_turn([0, 1, 0, 1])), x4())
    check(module, split_module(module, None, in_turn([0, 1, 0, 1]), keep_original_order=True), x4())


def test_attributes_are_read_before_their_first_part_in_the_original_order() -> None:
    draft = Draft(one=nn.Parameter(torch.ones(4)), two=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    a = draft.call(torch.add, x, draft.attr("one"))
    module = draft.done(draft.call(torch.add, a, draft.attr("two")))
    result = split_module(module, None, every(1), keep_original_order=True)
    assert [node.name for node in result.graph.nodes] == ["x", "one", "submod_0", "two", "submod_1", "output"]
    check(module, result, x4())


# The input stays as it was; metadata -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [residual, graded, nested_modes, autocast_draft, reshaping, inferring])
def test_the_input_is_untouched(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    for at, node in enumerate(module.graph.nodes):
        node.meta["custom"] = {"list": [at], "dict": {"at": at}}
    before = dump(module)
    result = cut(module, every(2))
    assert dump(module) == before
    runs(result, torch.ones(6, 4) if make is reshaping else torch.ones(4, 4))
    assert dump(module) == before


def test_nested_metadata_is_not_shared_with_the_input(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    y = draft.call(torch.mul, draft.call(torch.sin, x), draft.attr("weight"))
    module = draft.done(draft.call(torch.cos, y))
    for node in module.graph.nodes:
        node.meta["custom"] = {"deep": {"list": [node.name]}}
    module.meta["config"] = {"deep": [1]}
    result = cut(module, every(1))
    for each in (result, *parts(result).values()):
        for node in each.graph.nodes:
            if "custom" in node.meta:
                node.meta["custom"]["deep"]["list"].append("edited")
                node.meta["custom"]["deep"]["new"] = 1
    result.meta.setdefault("config", {"deep": []})["deep"].append(2)
    for node in module.graph.nodes:
        assert node.meta["custom"] == {"deep": {"list": [node.name]}}
    assert module.meta["config"] == {"deep": [1]}


def test_module_metadata_is_kept(cut: Cut) -> None:
    module = residual()
    module.meta["dynamo_flat_name_to_original_fqn"] = {"a": "b"}
    result = cut(module, every(2))
    assert result.meta["dynamo_flat_name_to_original_fqn"] == {"a": "b"}
    assert "partition_names" not in module.meta


def test_the_metadata_of_every_operator_arrives_in_its_part(cut: Cut) -> None:
    module = reshaping()
    for node in module.graph.nodes:
        node.meta["origin"] = node.name
    result = cut(module, every(2))
    inside = {n.meta.get("origin") for part in parts(result).values() for n in operators(part)}
    outside = {node.meta.get("origin") for node in result.graph.nodes}
    assert {node.name for node in operators(module)} <= inside | outside
    assert {node.name for node in module.graph.nodes if node.op in ("placeholder", "output")} <= outside


@pytest.mark.parametrize("key", ["val", "example_value"])
def test_the_outer_calls_and_items_carry_the_values_that_they_give(cut: Cut, key: str) -> None:
    draft = Draft()
    value = torch.empty(4)
    x = draft.input("x", **{key: value})
    a = draft.call(torch.sin, x, meta={key: torch.empty(4, 1)})
    b = draft.call(torch.cos, x, meta={key: torch.empty(4, 2)})
    c = draft.call(torch.add, a, b, meta={key: torch.empty(4, 3)})
    module = draft.done((draft.call(torch.neg, c, meta={key: torch.empty(4, 5)}), a))
    result = cut(module, in_turn([0, 0, 1, 2]))
    for node in result.graph.nodes:
        if node.op in ("call_module", "call_function"):
            assert key in node.meta, node
            if node.op == "call_module":
                output = result.get_submodule(str(node.target)).graph.output_node().args[0]
                wanted, given = (each if isinstance(each, tuple) else (each,) for each in (output, node.meta[key]))
                assert [id(value) for value in given] == [id(inner.meta[key]) for inner in wanted]
            else:
                call, at = node.args
                assert node.meta[key] is call.meta[key][at]


def test_traced_values_do_not_carry_over_stack_traces_of_other_nodes(cut: Cut) -> None:
    module = residual()
    for node in operators(module):
        node.meta["stack_trace"] = node.name
    result = cut(module, every(1))
    for part in parts(result).values():
        for node in operators(part):
            assert node.meta["stack_trace"].startswith(node.name.split("_")[0])


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_that_of_the_input(cut: Cut, training: bool) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())).train(training)
    result = cut(module, every(1))
    assert result.training is training
    assert all(part.training is training for part in parts(result).values())
    check(module, result, x4())
    result.train(not training)
    assert module.get_submodule("1").training is not training


def test_a_child_with_a_training_flag_of_its_own_keeps_it(cut: Cut) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))).train()
    module.get_submodule("1").eval()
    result = cut(module, every(1))
    flags = [child.training for child in result.modules() if isinstance(child, nn.Dropout)]
    assert flags == [False, True]
    check(module, result, x4())


# State -----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        return self.head(x.relu())


@pytest.mark.parametrize("capture", [symbolic_trace, lambda model: exported(model, torch.tensor([1, 2]))])
def test_tied_weights_stay_tied_and_parameters_are_shared(
    cut: Cut, capture: Callable[[nn.Module], GraphModule]
) -> None:
    module = capture(Tied())
    result = cut(module, every(2))
    assert {id(p) for p in result.parameters()} == {id(p) for p in module.parameters()}
    assert {id(b) for b in result.buffers()} == {id(b) for b in module.buffers()}
    check(module, result, torch.tensor([1, 2]))
    result(torch.tensor([1, 2])).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_buffers_that_are_not_saved_stay_so(cut: Cut) -> None:
    module = symbolic_trace(Tied())
    module._non_persistent_buffers_set.add("scale")  # symbolic_trace itself forgets it.
    result = cut(module, every(1))
    assert "scale" not in result.state_dict()
    assert "shift" in result.state_dict()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.ones(4))
        self.block.register_buffer("hidden", torch.ones(4), persistent=False)
        self.block.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.block.inner(x * self.block.weight + self.block.hidden).relu()


def test_dotted_attributes_keep_their_paths_and_persistence(cut: Cut) -> None:
    module = symbolic_trace(Deep())
    module.block._non_persistent_buffers_set.add("hidden")
    for step in (1, 2, 100):
        result = cut(module, every(step))
        assert dict(result.named_parameters())["block.weight"] is module.block.weight
        assert not any(name.endswith("hidden") for name in result.state_dict())
        check(module, result, x4())


def test_plain_tensor_attributes_and_other_constants_arrive(cut: Cut) -> None:
    draft = Draft(scale=2.5, names=("a", "b"))
    draft.root.__dict__["plain"] = torch.full((4,), 7.0)
    x = draft.input("x")
    y = draft.call(torch.mul, x, draft.attr("plain"))
    module = draft.done(draft.call(torch.mul, y, draft.attr("scale")))
    module.__dict__["plain"], module.__dict__["scale"] = torch.full((4,), 7.0), 2.5
    check(module, cut(module, every(1)), x4())


def test_hooks_of_the_module_still_run(cut: Cut) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("pre"))
    module.register_forward_hook(lambda *_: seen.append("post"))
    module.get_submodule("0").register_forward_hook(lambda *_: seen.append("child"))
    result = cut(module, every(1))
    result(x4())
    assert seen == ["pre", "child", "post"]
    result.register_forward_hook(lambda *_: seen.append("own"))
    module(x4())
    assert "own" not in seen


def test_a_checkpoint_of_the_original_loads_into_a_native_split_and_back() -> None:
    module = symbolic_trace(Tied())
    plan = partita.plan(partita.Program.of(module), ByLabel(every(2)), Call())
    after = plan.apply(state_names="original").module()
    assert set(after.state_dict()) == set(module.state_dict())
    changed = {key: value + 1 for key, value in module.state_dict().items()}
    after.load_state_dict(changed)
    assert all(torch.equal(module.state_dict()[key], value) for key, value in changed.items())


# Bodies of higher-order operators --------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 1
        z = torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
        return z * torch.cond(z.sum() > 0, lambda a: a + 1, lambda a: a - 1, (z,))


@pytest.mark.parametrize("step", [2, 100])
def test_bodies_of_cond_move_into_the_part_that_uses_them(cut: Cut, step: int) -> None:
    module = branching()
    result = cut(module, every(step))
    for x in (x4(), -x4()):
        assert same(result(x), module(x))
    bodies = {node for node in result.graph.find_nodes(op="get_attr") if "graph" in str(node.target)}
    assert not any(call.op == "call_module" for body in bodies for call in body.users)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        with torch.no_grad():
            z = self.linear(y).cos()
        return y + z


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_a_no_grad_body_of_an_exported_module_keeps_its_meaning(cut: Cut, step: int) -> None:
    module = frozen()
    result = cut(module, every(step))
    check(module, result, x4())
    grads = []
    for each in (module, result):
        module.zero_grad()
        each(x4()).sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert same(*grads)


def test_a_body_shared_by_two_parts_is_in_both(cut: Cut) -> None:
    body = symbolic_trace(lambda a: (a.sin(),))
    draft = Draft(body=body)
    x = draft.input("x")
    shared = draft.attr("body")
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    first = draft.call(GETITEM, draft.call(wrap, False, shared, x), 0)
    second = draft.call(GETITEM, draft.call(wrap, False, shared, first), 0)
    module = draft.done(second)
    for labels in ([0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]):
        check(module, cut(module, in_turn(labels)), x4().requires_grad_())


# Copies, threads, and other passes over the result ---------------------------------------------------------------


@pytest.mark.parametrize("make", [residual, graded, nested_modes, autocast_draft, inferring])
@pytest.mark.parametrize("called_before", [True, False])
def test_deepcopy_and_pickle_keep_results(cut: Cut, make: Callable[[], GraphModule], called_before: bool) -> None:
    module = make()
    result = cut(module, every(2))
    x = torch.ones(4, 4)
    if called_before:
        runs(result, x)
    for copied in (copy.deepcopy(result), pickle.loads(pickle.dumps(result)), copy.deepcopy(copy.deepcopy(result))):
        check(module, copied, x)
        assert dict(copied.named_parameters()).keys() == dict(result.named_parameters()).keys()
        assert copied.training == result.training
        assert copied.meta.get("partition_names") == result.meta.get("partition_names")


def test_pickle_keeps_random_draws_and_state(cut: Cut) -> None:
    draft = Draft(drop=nn.Dropout(0.5), count=torch.zeros(4))
    x = draft.input("x")
    y = draft.call(torch.rand, 4)
    draft.method("add_", draft.attr("count"), y)
    module = draft.done((draft.module("drop", x), draft.call(torch.add, y, draft.attr("count"))))
    result = cut(module, every(1))
    copied = pickle.loads(pickle.dumps(result))
    expected, given = (runs(each, x4()) for each in (module, copied))
    assert same(expected, given)


def test_copies_of_exported_modules_keep_their_signature(cut: Cut) -> None:
    args, kwargs = (x4(), {"bias": x4() + 1}), {"scale": x4() + 2}
    module = structured("dataclass")
    check(module, copy.deepcopy(cut(module, every(2))), *args, **kwargs)  # What export gives does not pickle.


def test_a_pickled_result_keeps_a_signature_of_trees(cut: Cut) -> None:
    traced = make_fx(lambda x, more: {"sum": x + more["y"], "sin": (x.sin(), [more["y"]])})
    module = traced(x4(), {"y": x4()})
    result = cut(module, every(1))
    check(module, pickle.loads(pickle.dumps(result)), x4(), {"y": x4()})


def test_a_copy_shares_nothing_with_the_original(cut: Cut) -> None:
    module = symbolic_trace(Tied())
    copied = copy.deepcopy(cut(module, every(2)))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in module.parameters()}
    assert len(set(copied.parameters())) == len(set(module.parameters()))


@pytest.mark.parametrize("make", [residual, graded])
def test_threads_may_call_a_fresh_result_at_once(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    wanted = module(x4())
    for _ in range(5):
        result = cut(module, every(1))
        start, failed = threading.Barrier(4), []

        def call(result: GraphModule = result, start: threading.Barrier = start, failed: list[object] = failed) -> None:
            start.wait()
            try:
                if not same(result(x4()), wanted):
                    failed.append("other values")
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


@pytest.mark.parametrize(
    "make",
    [
        residual,
        graded,
        pytest.param(
            autocast_draft, marks=pytest.mark.skipif(IS_OLD, reason="Dynamo of torch 2.11 cannot trace _enter_autocast")
        ),
    ],
)
def test_a_result_compiles_whole(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    torch._dynamo.reset()
    compiled = torch.compile(cut(module, every(2)), backend="aot_eager", fullgraph=True)
    x = torch.ones(4, 4).requires_grad_()
    wanted, given = module(x), compiled(x)
    wanted, given = (each if isinstance(each, tuple) else (each,) for each in (wanted, given))
    assert [t.dtype for t in wanted] == [t.dtype for t in given]
    assert [t.requires_grad for t in wanted] == [t.requires_grad for t in given]
    assert all(map(torch.allclose, wanted, given))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", [residual, graded])
def test_a_result_can_be_exported(cut: Cut, make: Callable[[], GraphModule], strict: bool) -> None:
    module = make()
    again = torch.export.export(cut(module, every(2)), (x4(),), strict=strict).module()
    assert same(again(x4()), module(x4()))


def test_a_result_can_be_traced_again(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    again = symbolic_trace(cut(module, every(2)))
    check(module, again, x4())


def test_a_result_runs_in_an_interpreter_and_a_transformer(cut: Cut) -> None:
    for module in (symbolic_trace(Colliding()), autocast_draft()):
        x = torch.ones(4, 4)
        result = cut(module, every(2))
        assert same(torch.fx.Interpreter(result).run(x), module(x))
        assert same(torch.fx.Transformer(result).transform()(x), module(x))


def test_a_result_prints_lints_and_recompiles(cut: Cut) -> None:
    module = graded()
    result = cut(module, every(2))
    result.print_readable(print_output=False)
    for each in (result, *parts(result).values()):
        each.graph.lint()
        each.recompile()
        assert "def forward" in each.code
    check(module, result, x4().requires_grad_())


def test_new_nodes_can_be_added_to_a_result_without_a_clash_of_names(cut: Cut) -> None:
    module = residual()
    result = cut(module, every(1))
    for each in (*parts(result).values(), result):
        output = each.graph.output_node()
        with each.graph.inserting_before(output):
            for name in ("sin", "x", "cos", "add"):
                each.graph.call_function(torch.ones, (1,), name=name)
        names = [node.name for node in each.graph.nodes]
        assert len(names) == len(set(names))
        each.recompile()
    check(module, result, x4())


def test_a_subclass_of_graph_module_can_be_split(cut: Cut) -> None:
    class Special(GraphModule):
        def __init__(self, root: nn.Module, graph: torch.fx.Graph) -> None:
            super().__init__(root, graph, class_name="Special")

    plain = symbolic_trace(Colliding())
    module = Special(plain, plain.graph)
    check(module, cut(module, every(2)), x4())


def test_a_result_moves_and_converts_like_a_module(cut: Cut) -> None:
    module = symbolic_trace(Tied())
    result = copy.deepcopy(cut(module, every(2))).double()
    assert result(torch.tensor([1])).dtype == torch.float64


# Simple splitting ------------------------------------------------------------------------------------------------


def test_a_simple_split_does_not_break_a_later_split_of_the_same_graph() -> None:
    module = residual()
    before = dump(module)
    split_module_simple(module, {node: at for at, node in enumerate(operators(module))})
    assert dump(module) == before
    check(module, split_module(module, None, lambda node: 0), x4())
    from torch.fx.passes.split_module import split_module as torch_split_module

    check(module, torch_split_module(module, None, lambda node: 0), x4())


def test_a_simple_split_sorts_interleaved_parts() -> None:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, x)
    module = draft.done(draft.call(torch.add, a, b))
    nodes = operators(module)
    result = split_module_simple(module, {nodes[0]: 0, nodes[1]: 1, nodes[2]: 0})
    assert list(parts(result)) == ["submod_1", "submod_0"]
    check(module, result, x4())


def test_a_simple_split_does_not_decompose_the_sizes_of_its_input() -> None:
    module = sizes("dynamo")
    before = dump(module)
    split_module_simple(module, {node: at // 2 for at, node in enumerate(operators(module))})
    assert dump(module) == before


def test_a_simple_split_takes_a_mapping_that_covers_more_than_the_operators() -> None:
    module = residual()
    result = split_module_simple(module, dict.fromkeys(module.graph.nodes, 0))
    check(module, result, x4())


# Regions that are legal one by one, natively -------------------------------------------------------------------------


def test_nodes_without_a_label_stay_outside_in_their_order() -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    draft.method("add_", draft.attr("count"), a)
    b = draft.call(torch.add, draft.attr("count"), 1.0)
    module = draft.done((b, draft.call(torch.cos, a)))
    program = partita.Program.of(module)
    after = partita.plan(program, ByLabel(by_name({"sin": "a", "cos": "a", "add": "b"}, None)), Call()).apply()
    check(module, after.module(), x4())


def test_a_plan_over_modes_leaves_unlabelled_nodes_in_theirs() -> None:
    for make in (graded, nested_modes, autocast_draft, inferring):
        module = make()
        for odd in (0, 1):
            program = partita.Program.of(module)
            label = in_turn([at if at % 2 == odd else None for at in range(len(operators(module)))])
            after = partita.plan(program, ByLabel(label), Call()).apply()
            check(module, after.module(), torch.ones(4, 4))


def test_equal_results_come_from_equal_calls() -> None:
    module = nested_modes()
    for cut in CUTS.values():
        one, other = cut(module, every(2)), cut(module, every(2))
        assert one.code == other.code
        assert [part.code for part in parts(one).values()] == [part.code for part in parts(other).values()]


# Odd corners -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["class", "forward", "a.b", "with space", "", "graph", "training", "1", "é", "x"])
def test_any_text_is_a_label(cut: Cut, label: str) -> None:
    module = residual()
    result = cut(module, in_turn([label, label, "other", "other", label + "_"]))
    check(module, result, x4())
    check(module, pickle.loads(pickle.dumps(result)), x4())
    check(module, cut(result, every(2)), x4())


@pytest.mark.parametrize("affix", ["a.b", "a-b", "", "1"])
def test_any_text_is_an_affix(affix: str) -> None:
    module = residual()
    check(module, split_module(module, None, every(2), partition_affix=affix), x4())


@pytest.mark.parametrize("make", [graded, nested_modes, autocast_draft, inferring])
def test_parts_and_results_with_modes_can_be_cut_again(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    result = cut(module, every(3))
    check(module, cut(result, every(1)), torch.ones(4, 4))
    for name, part in parts(result).items():
        setattr(result, name, cut(part, every(2)))
    check(module, result, torch.ones(4, 4))


def test_a_question_about_the_mode_is_answered_under_the_mode_it_was_asked_in(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.is_grad_enabled)
    draft.grad(False)
    inside = draft.call(torch.is_grad_enabled)
    draft.grad(before)
    entered = draft.enter_autocast()
    cast = draft.call(torch.is_autocast_enabled, "cpu")
    draft.exit_autocast(entered)
    module = draft.done((before, inside, cast, draft.call(torch.is_grad_enabled), draft.call(torch.sin, x)))
    count = len(operators(module))
    for labels in ([0] * count, range(count), [at // 2 for at in range(count)], [at // 3 for at in range(count)]):
        for outer in (True, False):
            with torch.set_grad_enabled(outer):
                result = cut(module, in_turn(list(labels)))
                assert result(x4())[:4] == module(x4())[:4] == (outer, False, True, outer)


def test_empty_slots_of_a_module_survive(cut: Cut) -> None:
    class Slotted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = None
            self.linear = nn.Linear(4, 4, bias=False)
            self.register_buffer("cache", None)
            self.register_parameter("gate", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin()

    module = symbolic_trace(Slotted())
    check(module, cut(module, every(1)), x4())


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


def test_a_graph_with_vmap_in_it_is_kept_whole_or_refused(cut: Cut) -> None:
    def mapped(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row.sin() * row).sum())(x).cos() + 1

    module = dynamo_graph(mapped, torch.randn(3, 4), dynamic=False)
    for step in (1, 2, 3, 100):
        refused_or_same(cut, module, every(step), torch.randn(3, 4))


def trained(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ weight
        with torch.no_grad():
            z = (y @ weight).sin()
    w = y.float() + z.float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        v = w @ weight
    return w * v


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_modes_and_gradients_survive_inside_torch_compile(cut: Cut, inner: str) -> None:
    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        result = cut(module, every(3))
        if inner == "eager":
            return result.forward
        return torch._dynamo.lookup_backend("aot_eager")(result, inputs)

    torch._dynamo.reset()
    results = []
    for function in (trained, torch.compile(trained, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        out = function(x, weight)
        out.sum().backward()
        results.append((out.detach(), x.grad, weight.grad))
    assert all(map(torch.allclose, *results))
    assert ambient()[:3] == (True, False, False)


def test_a_write_inside_a_body_of_an_operator_is_an_effect_of_its_call(cut: Cut) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            early = self.count * 2
            with torch.no_grad():
                self.count.add_(x)
            return early, self.count * 3

    module = exported(Counting(), x4())
    count = len(operators(module))
    for labels in (
        range(count),
        range(count, 0, -1),
        [at // 2 for at in range(count)],
        [at % 2 for at in range(count)],
    ):
        refused_or_same(cut, module, in_turn(list(labels)), x4())


def test_weights_shared_by_two_paths_are_written_once(cut: Cut) -> None:
    shared = nn.BatchNorm1d(4)
    draft = Draft(one=shared, other=shared)
    x = draft.input("x")
    y = draft.module("one", x)
    module = draft.done(draft.module("other", y))
    result = cut(module, in_turn([1, 0]))
    check(module, result, torch.randn(5, 4))
    assert len({id(b) for b in result.buffers()}) == 3


def test_many_parts_are_called_in_an_order_that_a_chain_allows(cut: Cut) -> None:
    draft = Draft()
    value = draft.input("x")
    for _ in range(100):
        value = draft.call(torch.sin, value)
    module = draft.done(value)
    result = cut(module, every(1))
    assert len(parts(result)) == 100
    check(module, result, x4())
