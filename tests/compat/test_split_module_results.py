"""What else works on a split module: copies, pickle, threads, torch.compile, export and other transforms."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from tests.compat.split_helpers import Cut, Draft, every, parts, same
from tests.compat.split_models import (
    Colliding,
    Tied,
    autocast_draft,
    check,
    dynamo_graph,
    graded,
    inferring,
    nested_modes,
    refused_or_same,
    residual,
    runs,
    structured,
    x4,
)
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

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


def test_pickle_keeps_random_numbers_and_state(cut: Cut) -> None:
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


# Other transforms of the graph -----------------------------------------------------------------------------------


def test_a_graph_with_vmap_in_it_is_kept_whole_or_refused(cut: Cut) -> None:
    def mapped(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row.sin() * row).sum())(x).cos() + 1

    module = dynamo_graph(mapped, torch.randn(3, 4), dynamic=False)
    for step in (1, 2, 3, 100):
        refused_or_same(cut, module, every(step), torch.randn(3, 4))
