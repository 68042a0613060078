"""`compat.utils` against torch's own helpers: the same text wherever torch is right, and right where it is not.

Where ours differs on purpose:

| difference | why |
|---|---|
| toggles that a part repeats stand after its inputs | torch writes them before, which no lint accepts |
| an autocast block that is never left is handled | torch refuses it |
| a node that would be read before it is computed, or would read itself, is refused | the graph would be broken |
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import Draft, ambient, dump, operators, parts, same
from tests.compat.test_split_module_parity import described, random_graph, with_inputs_called_by_name
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch._export import utils as theirs
from torch._export.passes.replace_set_grad_with_hop_pass import (
    _is_set_grad_enabled_node,
    _is_set_grad_enabled_sub_mod,
)
from torch.amp.autocast_mode import _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from partita.compat import utils as ours
from partita.errors import BrokenGraphError, CallbackError, ModeError, OptionError

X = torch.linspace(-2, 2, 4)
AS_IN_TORCH_2_13 = pytest.mark.skipif(
    "tuple_return" not in inspect.signature(torch.fx.passes.split_module.split_module).parameters,
    reason="the names, order and text are those of the split_module of torch 2.13",
)


def calls(module: GraphModule) -> list[Node]:
    return module.graph.find_nodes(op="call_module")


def inline_all(module: GraphModule, inline: Callable[[Node], Any]) -> GraphModule:
    ours.nodes_map(module.graph.nodes, lambda node: inline(node) if node.op == "call_module" else node)
    return module


def targets(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")]


# Lists of nodes --------------------------------------------------------------------------------------------------


def test_lists_of_nodes_are_filtered_counted_and_mapped_as_torch_does() -> None:
    nodes = list(random_graph(3, size=10).graph.nodes)
    is_call = lambda node: node.op == "call_function"  # noqa: E731
    for name in ("nodes_filter", "nodes_first", "nodes_count"):
        assert getattr(ours, name)(nodes, is_call) == getattr(theirs, name)(nodes, is_call)
        assert getattr(ours, name)([], is_call) == getattr(theirs, name)([], is_call)
    assert ours.nodes_first(nodes) is nodes[0]
    assert ours.nodes_first(nodes, lambda node: False) is None
    assert ours.nodes_first([]) is None
    seen: list[Node] = []
    assert ours.nodes_map(nodes, seen.append) is nodes
    assert seen == nodes


def test_the_signatures_are_torchs() -> None:
    for name in ours.__all__:
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        )


# Replacing a node ------------------------------------------------------------------------------------------------


def replaced(replace: Callable[[Node, Node], None]) -> tuple[GraphModule, list[tuple[str, str, str]]]:
    draft = Draft()
    x = draft.input("x")
    old = draft.call(torch.sin, x)
    new = draft.call(torch.cos, x)
    module = draft.done((draft.call(torch.add, old, old), [old, {"a": old}], draft.call(torch.neg, new)))
    told: list[tuple[str, str, str]] = []
    with module._set_replace_hook(lambda old, new, user: told.append((old.name, new, user.name))):
        assert replace(old, new) is None  # type: ignore[func-returns-value]
    module.recompile()
    module.graph.lint()
    return module, told


def test_a_node_is_replaced_as_torch_does_hooks_included() -> None:
    mine, told = replaced(ours.node_replace_)
    torchs, told_by_torch = replaced(theirs.node_replace_)
    assert mine.code == torchs.code
    assert told == told_by_torch == [("sin", "cos", "add"), ("sin", "cos", "output")]


def chain_of_three() -> tuple[GraphModule, Node, Node, Node]:
    draft = Draft()
    first = draft.call(torch.sin, draft.input("x"))
    second = draft.call(torch.cos, first)
    third = draft.call(torch.neg, second)
    return draft.done(third), first, second, third


@pytest.mark.parametrize(
    ("pick", "words"),
    [
        (lambda a, b, c: (a, b), "'sin' cannot be replaced by 'cos', which reads it"),
        (lambda a, b, c: (a, a), "they are one node"),
        (lambda a, b, c: (a, c), "'cos' reads it earlier, and what 'neg' reads comes after"),
        (lambda a, b, c: (a, Draft().input("y")), "different graphs"),
    ],
)
def test_a_replacement_that_breaks_the_graph_is_refused(pick: Any, words: str) -> None:
    module, *nodes = chain_of_three()
    before = dump(module)
    with pytest.raises(BrokenGraphError, match=words):
        ours.node_replace_(*pick(*nodes))
    assert dump(module) == before


def test_an_erased_node_is_not_replaced() -> None:
    module, first, second, third = chain_of_three()
    ours.node_replace_(third, second)
    with pytest.raises(BrokenGraphError, match="not in the graph any more"):
        ours.node_replace_(third, second)
    assert torch.equal(GraphModule(module, module.graph)(X), X.sin().cos())
    assert first in second.all_input_nodes


# Splitting in order ----------------------------------------------------------------------------------------------


def toggled() -> GraphModule:
    """Grad toggles with values used across several parts, and a parameter."""
    draft = Draft(w=nn.Parameter(torch.ones(4)))
    x, y = draft.input("x"), draft.input("y")
    added = draft.call(torch.add, x, y)
    draft.grad(False)
    weighted = draft.call(torch.mul, added, draft.attr("w"))
    wave = draft.call(torch.sin, weighted)
    draft.grad(True)
    back = draft.call(torch.add, wave, added)
    draft.grad(False)
    last = draft.call(torch.cos, back)
    draft.grad(True)
    return draft.done((draft.call(torch.sub, last, x), wave, draft.call(torch.relu, draft.attr("w"))))


def traced_toggles() -> GraphModule:
    """Toggles and operators only, as export sees them."""

    def forward(x, y):  # type: ignore[no-untyped-def]  # torch drops the annotation of what is returned
        first = x + y
        with torch.no_grad():
            second = first.sin() * x
            with torch.enable_grad():
                third = second + first
        return third.cos() - second, third

    return make_fx(forward, pre_dispatch=True)(X.clone().requires_grad_(), X)


def cast() -> GraphModule:
    draft = Draft(w=nn.Parameter(torch.eye(4)))
    x = draft.input("x")
    before = draft.call(torch.sin, x)
    entered = draft.enter_autocast()
    inside = draft.call(torch.matmul, before, draft.attr("w"))
    waves = draft.call(torch.cos, inside)
    inner = draft.enter_autocast(enabled=False)
    plain = draft.call(torch.add, waves, before)
    draft.exit_autocast(inner)
    more = draft.call(torch.matmul, plain, draft.attr("w"))
    draft.exit_autocast(entered)
    return draft.done((draft.call(torch.add, more, x), inside))


def at(*names: str) -> Callable[[Node], bool]:
    return lambda node: node.name in names


def compare_sequential(make: Callable[[], GraphModule], marks: Callable[[Node], Any], *args: Any) -> bool:
    """Compares both splits and both ways back; whether torch had a right split to compare with."""
    module = make()
    before = dump(module)
    state = ambient()
    wanted = module(*args)
    left = ambient()
    mine = ours.sequential_split(module, marks)
    assert dump(module) == before
    mine.graph.lint()
    for part in parts(mine).values():
        part.graph.lint()
    restored(state)
    assert same(mine(*args), wanted)
    assert ambient() == left
    restored(state)
    try:
        torchs = theirs.sequential_split(make(), marks)
        given = torchs(*args)
    except Exception:
        return False
    if not same(given, wanted):
        return False
    expected, found = described(torchs), described(mine)
    for key in expected:
        if key != "nodes":  # torch writes toggles that it repeats before the inputs of a part.
            assert found[key] == expected[key], key
    return True


def restored(state: tuple[Any, ...]) -> None:
    torch.set_grad_enabled(state[0])


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("make", [toggled, cast])
def test_graphs_with_modes_are_split_as_torch_splits_them(make: Callable[[], GraphModule]) -> None:
    inputs = [torch.eye(4).requires_grad_() for _ in make().graph.find_nodes(op="placeholder")]
    names = [node.name for node in operators(make())]
    for seed in range(30):
        dice = random.Random(seed)
        marks = at(*dice.sample(names, dice.randint(1, len(names))))
        assert compare_sequential(make, marks, *inputs)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seeds", slow_but([range(24), range(24, 96)], range(24)))
def test_generated_graphs_are_split_as_torch_splits_them(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        size = random.Random(seed).choice([1, 3, 8, 20])
        make = with_inputs_called_by_name(lambda s=seed, n=size: random_graph(s, size=n))  # type: ignore[misc]
        every = [node.name for node in make().graph.nodes]
        chosen = random.Random(seed).sample(every, random.Random(seed).randint(0, min(5, len(every))))
        args = [X + place for place in range(len(make().graph.find_nodes(op="placeholder")))]
        compared += compare_sequential(make, at(*chosen), *args)
    assert compared > len(seeds) * 2 // 3


def test_a_part_begins_with_its_toggle() -> None:
    mine = ours.sequential_split(toggled(), _is_set_grad_enabled_node)
    assert list(parts(mine)) == ["submod_0", "submod_1", "submod_2", "submod_3", "submod_4"]
    counted = ours.nodes_count(mine.graph.nodes, _is_set_grad_enabled_sub_mod)
    assert counted == ours.nodes_count(toggled().graph.nodes, _is_set_grad_enabled_node) == 4


def test_splitting_at_toggles_and_inlining_gives_the_text_of_the_graph() -> None:
    module = traced_toggles()
    before = module.print_readable(print_output=False)
    split = ours.sequential_split(module, _is_set_grad_enabled_node)
    assert len(calls(split)) == 5
    assert inline_all(split, ours.node_inline_).print_readable(print_output=False) == before
    torchs = theirs.sequential_split(traced_toggles(), _is_set_grad_enabled_node)
    assert inline_all(torchs, theirs.node_inline_).code == module.code


def test_a_block_that_is_not_cut_comes_back_as_it_was() -> None:
    mine = inline_all(ours.sequential_split(cast(), at("_enter_autocast")), ours.node_inline_)
    torchs = inline_all(theirs.sequential_split(cast(), at("_enter_autocast")), theirs.node_inline_)
    assert mine.code == torchs.code


def test_an_inference_block_that_is_cut_is_entered_again() -> None:
    draft = Draft()
    x = draft.input("x")
    draft.grad(False)
    entered = draft.enter_inference()
    first = draft.call(torch.sin, x)
    draft.grad(True)
    second = draft.call(torch.cos, first)
    draft.exit_inference(entered)
    module = draft.done((draft.call(torch.neg, second), draft.call(torch.is_grad_enabled)))
    mine = ours.sequential_split(module, at("cos", "neg"))
    for part in parts(mine).values():
        part.graph.lint()
    codes = [part.code for part in parts(mine).values()]
    assert [code.count("_enter_inference_mode(") for code in codes] == [1, 1, 0]
    assert [code.count("_exit_inference_mode(") for code in codes] == [1, 1, 0]
    with torch.enable_grad():
        value, grad = mine(X)
        assert torch.equal(value, X.sin().cos().neg())
    with torch.enable_grad():
        assert grad is module(X)[1] is False
    assert not torch.is_inference_mode_enabled()


def test_a_mode_that_a_value_puts_back_crosses_as_a_value() -> None:
    draft = Draft()
    x = draft.input("x")
    asked = draft.call(torch.is_grad_enabled)
    draft.grad(False)
    first = draft.call(torch.sin, x)
    draft.grad(asked)
    module = draft.done((draft.call(torch.cos, first), draft.call(torch.neg, x)))
    mine = ours.sequential_split(module, lambda node: node.op == "call_function")
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert same(mine(X.clone().requires_grad_()), module(X.clone().requires_grad_()))
            assert torch.is_grad_enabled() is enabled


def by_keyword() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    entered = draft.enter_autocast()
    first = draft.call(torch.matmul, x, x)
    draft.call(torch._C._set_grad_enabled, enabled=False)
    second = draft.call(torch.sin, first)
    third = draft.call(torch.matmul, second, x)
    draft.call(torch._C._set_grad_enabled, enabled=True)
    draft.call(_exit_autocast, mode=entered)
    inference = draft.call(_enter_inference_mode, mode=True)
    fourth = draft.call(torch.cos, third)
    fifth = draft.call(torch.neg, x)
    draft.call(_exit_inference_mode, mode=inference)
    return draft.done((first, second, third, fourth, fifth, draft.call(torch.add, x, x)))


def test_toggles_with_keywords_are_split_like_any_other() -> None:
    x = torch.eye(4).requires_grad_()
    names = [node.name for node in operators(by_keyword())]
    for marks in [at(name) for name in names] + [lambda node: True]:
        compare_sequential(by_keyword, marks, x)
    mine = ours.sequential_split(by_keyword(), at("_enter_autocast"))
    assert inline_all(mine, ours.node_inline_).code == by_keyword().code


def test_an_autocast_that_is_never_left_stays_on() -> None:
    draft = Draft()
    draft.enter_autocast()
    module = draft.done(draft.call(torch.matmul, *[draft.call(torch.sin, draft.input("x"))] * 2))
    mine = ours.sequential_split(module, at("matmul"))
    try:
        assert mine(torch.eye(4)).dtype is torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_blocks_that_cross_are_refused_by_name_where_they_are_cut() -> None:
    draft = Draft()
    x = draft.input("x")
    outer = draft.enter_autocast()
    inner = draft.enter_autocast(torch.float16)
    draft.exit_autocast(outer)
    first = draft.call(torch.sin, x)
    second = draft.call(torch.cos, first)
    draft.exit_autocast(inner)
    module = draft.done(second)
    before = dump(module)
    with pytest.raises(ModeError, match=r"before 'cos'.*'_enter_autocast_1' is still open"):
        ours.sequential_split(module, at("cos"))
    assert dump(module) == before
    assert len(parts(ours.sequential_split(module, at("_enter_autocast")))) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda draft, entered: draft.exit_autocast(entered),
        lambda draft, entered: draft.call(_exit_autocast, 3),
        lambda draft, entered: draft.call(torch._C._set_grad_enabled, entered),
    ],
)
def test_toggles_without_a_meaning_are_refused_by_name(spoil: Any) -> None:
    draft = Draft()
    x = draft.input("x")
    entered = draft.enter_autocast()
    draft.exit_autocast(entered)
    spoilt = spoil(draft, entered)
    module = draft.done(draft.call(torch.sin, x))
    with pytest.raises(ModeError, match=spoilt.name):
        ours.sequential_split(module, at("sin"))


def test_a_failing_callback_is_named_and_changes_nothing() -> None:
    module = toggled()
    before = dump(module)
    with pytest.raises(CallbackError, match="KeyError for node 'x'"):
        ours.sequential_split(module, lambda node: node.meta["stage"])
    with pytest.raises(OptionError, match="Linear"):
        ours.sequential_split(nn.Linear(2, 2), lambda node: True)  # type: ignore[arg-type]
    assert dump(module) == before


def test_the_callback_is_called_once_for_every_node_in_order() -> None:
    module, seen = toggled(), []
    ours.sequential_split(module, lambda node: seen.append(node))  # type: ignore[func-returns-value]
    assert seen == list(module.graph.nodes)


def test_the_input_of_a_sequential_split_is_untouched() -> None:
    for module in (toggled(), random_graph(5, size=12)):
        before, code = dump(module), module.code
        mine = ours.sequential_split(module, lambda node: node.op == "call_function")
        assert dump(module) == before
        assert mine.graph._codegen is not module.graph._codegen
        assert not any(hasattr(node, "_fx_partition") for node in module.graph.nodes)
        for node in mine.graph.nodes:
            node.meta["edited"] = True
        mine.graph._codegen.gen_fn_def = None  # type: ignore[method-assign, assignment]
        module.recompile()
        assert module.code == code


def test_an_exported_module_keeps_its_calling_convention() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
            with torch.no_grad():
                wave = self.linear(x["a"]).sin()
            return {"out": wave * scale, "pair": (x["a"], wave)}

    model = Nested()
    module = torch.export.export(model, ({"a": X},), {"scale": X}).module()
    mine = ours.sequential_split(module, lambda node: node.name.startswith(("mul", "sin")))
    assert same(mine({"a": X}, scale=X), model({"a": X}, scale=X))


def test_a_body_of_an_operator_moves_into_its_part_and_back() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.relu(),)) + 1

    module = make_fx(branches, tracing_mode="symbolic")(X)
    mine = ours.sequential_split(module, lambda node: node.name.startswith("cond"))
    assert torch.equal(mine(X), branches(X))
    back = inline_all(mine, ours.node_inline_)
    assert torch.equal(back(X), branches(X))
    assert sorted(targets(back)) == sorted(targets(module))
    assert calls(back) == []


def test_a_later_node_is_moved_up_to_the_first_reader() -> None:
    draft = Draft()
    x = draft.input("x")
    old = draft.call(torch.sin, x)
    readers = [draft.call(torch.neg, old), draft.call(torch.exp, old)]
    new = draft.call(torch.cos, x)
    module = draft.done(draft.call(torch.add, *readers))
    ours.node_replace_(old, new)
    module.graph.lint()
    module.recompile()
    value = torch.randn(3)
    assert torch.equal(module(value), -value.cos() + value.cos().exp())


def test_a_later_node_with_side_effects_keeps_its_place() -> None:
    draft = Draft()
    x = draft.input("x")
    old = draft.call(torch.sin, x)
    reader = draft.call(torch.neg, old)
    new = draft.call(torch.ops.aten.add_.Tensor, x, 1)
    module = draft.done(reader)
    before = str(module.graph)
    with pytest.raises(BrokenGraphError, match="has side effects"):
        ours.node_replace_(old, new)
    assert str(module.graph) == before
