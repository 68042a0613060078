"""Lazy modules: code comes with the first call and once, and copies and pickles hold the whole graph."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tests.helpers.copies import Copy, copies
from tests.helpers.core import cut, listing, program_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx._symbolic_trace import PH

from partita import Program, inline, verify
from partita._torch.fx.lazy_graph_module import LazyModule
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs for which code was generated."""
    made: list[Graph] = []
    real = Graph.python_code

    def counting(graph: Graph, *args: Any, **kwargs: Any) -> Any:
        made.append(graph)
        return real(graph, *args, **kwargs)

    monkeypatch.setattr(Graph, "python_code", counting)
    return made


def mlp() -> GraphModule:
    program = program_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    return cut(program, {"_0": "a", "_1": "a", "_2": "b"}).module()


def test_no_code_is_generated_before_the_first_call_and_then_once(generated: list[Graph]) -> None:
    program = program_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    generated.clear()
    module: Any = cut(program, {"_0": "a", "_1": "b"}).module()
    inline(Program.of(module))
    copy.deepcopy(module), pickle.dumps(module), module.state_dict(), module.train()
    assert generated == []
    for _ in range(3):
        module(torch.ones(2))
    assert generated.count(module.graph) == generated.count(module.a.graph) == generated.count(module.b.graph) == 1
    assert len(generated) == 3


class Compiled(nn.Module):
    """What stands for a part that a compiler took."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


def test_a_part_that_went_to_a_compiler_generates_no_code(generated: list[Graph]) -> None:
    module: Any = mlp()
    body = module._modules["a"]
    module._modules["a"] = Compiled()
    generated.clear()
    module(torch.ones(2))
    assert body.graph not in generated


def test_code_follows_the_graph_after_an_edit() -> None:
    module = mlp()
    x = torch.ones(2)
    before = module(x)
    with module.graph.inserting_before(module.graph.output_node()):
        output = module.graph.output_node()
        output.args = (module.graph.call_function(torch.neg, (output.args[0],)),)
    module.recompile()
    assert torch.equal(module(x), -before)
    assert "neg" in module.code


@pytest.mark.parametrize("_", range(5))
def test_threads_that_call_first_together_all_get_the_answer(_: int) -> None:
    module, x = mlp(), torch.ones(2)
    wanted = copy.deepcopy(module)(x)
    barrier, found = threading.Barrier(8), []

    def call() -> None:
        barrier.wait()
        found.append(module(x))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(value, wanted) for value in found)


def test_hooks_run_once_a_call_from_the_first_on() -> None:
    module: Any = mlp()
    ran: list[str] = []
    for name, owner in (("outer", module), ("a", module.a), ("b", module.b)):
        owner.register_forward_pre_hook(lambda *_, name=name: ran.append(f"before {name}"))
        owner.register_forward_hook(lambda *_, name=name: ran.append(f"after {name}"))
    one_call = ["before outer", "before a", "after a", "before b", "after b", "after outer"]
    module(torch.ones(2))
    assert ran == one_call
    module(torch.ones(2))
    assert ran == one_call * 2


def eventful() -> GraphModule:
    """Draws, toggles and a constant: all that torch's own pickling loses; in one part."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.rand, (3,))
    noise = graph.create_node("call_function", torch.rand, (2,), name="odd_name_7")
    block = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    product = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT_AUTOCAST, (block,))
    graph.call_function(SET_GRAD, (False,))
    value = graph.call_function(torch.add, (product, noise))
    graph.call_function(SET_GRAD, (True,))
    value.meta.update(stack={"inner": [("a", 1)]}, dtype=torch.float16, skipped=object())
    graph.output((value, product))
    program = program_of(graph)
    return cut(program, {node.name: "part" for node in program.operators()}).module()


@copies
def test_copies_hold_every_node_under_its_name(copied: Copy) -> None:
    module: Any = eventful()
    other: Any = copied(module)
    assert listing(other) == listing(module)
    assert listing(other.part) == listing(module.part)
    assert other.part is not module.part
    meta = next(node.meta for node in other.part.graph.nodes if node.name == "add")
    assert (meta["stack"], meta["dtype"]) == ({"inner": [("a", 1)]}, torch.float16)
    verify(Program.of(module), Program.of(other), (torch.ones(2, 2),))


@copies
def test_copies_of_copies_after_a_call_are_the_same(copied: Copy) -> None:
    module = eventful()
    module(torch.ones(2, 2))
    twice = copied(copied(module))
    assert twice.code == module.code
    verify(Program.of(module), Program.of(twice), (torch.ones(2, 2),))


@copies
def test_an_unpickled_graph_gives_new_nodes_new_names(copied: Copy) -> None:
    graph = copied(mlp()).graph
    with graph.inserting_before(graph.output_node()):
        graph.call_module("a", (next(iter(graph.nodes)),))
        graph.call_function(torch.neg, (next(iter(graph.nodes)),))
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    graph.lint()


@copies
def test_copies_keep_the_calling_convention(copied: Copy) -> None:
    traced = symbolic_trace(lambda d: {"sum": d["a"] + d["b"]}, concrete_args={"d": {"a": PH, "b": PH}})
    after = copied(cut(Program.of(traced), {"add": "part"}).module())
    assert after({"a": torch.ones(1), "b": torch.ones(1)})["sum"].item() == 2.0


@copies
def test_copies_own_their_state_and_share_it_inside(copied: Copy) -> None:
    linear = nn.Linear(2, 2)
    program = program_of(nn.Sequential(linear, nn.ReLU(), linear))
    names = [node.name for node in program.operators()]
    module: Any = cut(program, {names[0]: "a", names[2]: "b"}).module()
    other: Any = copied(module)
    parameters = dict(other.named_parameters(remove_duplicate=False))
    weights = [value for name, value in parameters.items() if name.endswith("weight")]
    assert len(weights) == 2
    assert weights[0] is weights[1]
    assert weights[0] is not linear.weight


def test_the_result_can_be_compiled_exported_and_traced() -> None:
    module, x = mlp(), torch.ones(2, 2)
    wanted = module(x)
    assert torch.equal(torch.compile(mlp_like(module), backend="eager", fullgraph=True)(x), wanted)
    assert torch.equal(torch.export.export(mlp_like(module), (x,)).module()(x), wanted)
    assert torch.equal(symbolic_trace(mlp_like(module))(x), wanted)


def mlp_like(module: GraphModule) -> GraphModule:
    """A copy that has never been called."""
    return copy.deepcopy(module)


def test_a_result_is_a_graph_module_like_any_other() -> None:
    module: Any = mlp()
    assert isinstance(module, GraphModule)
    assert isinstance(module.a, LazyModule)
    assert "def forward" in module.code
    assert "self.a" in str(module)
    module.eval()
    assert not module.a.training
    assert isinstance(module.to(torch.float64)(torch.ones(2, dtype=torch.float64)), Tensor)
