"""Splitting keeps grad, autocast and inference mode, also when a part raises or is called alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import Cut, Draft, ambient, every, in_turn, operators, parts
from tests.compat.split_models import autocast_draft, check, graded, inferring, nested_modes, refused_or_same, x4
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import has_side_effect

from partita.compat.split_module import split_module, split_module_simple
from partita.errors import ModeError


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


@pytest.mark.parametrize("make", [graded, nested_modes, autocast_draft, inferring])
def test_parts_and_results_with_modes_can_be_cut_again(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    result = cut(module, every(3))
    check(module, cut(result, every(1)), torch.ones(4, 4))
    for name, part in parts(result).items():
        setattr(result, name, cut(part, every(2)))
    check(module, result, torch.ones(4, 4))


def test_a_query_of_the_mode_is_answered_for_the_mode_around_it(cut: Cut) -> None:
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
