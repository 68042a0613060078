"""Operators with a body as nodes of graphs: traced, copied, pickled, printed, cleaned, and analysed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.hops.helpers import CASES, Case, printed_by_new_process
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Transformer, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from partita import Program, hops

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _body(*, writes: bool = False, returns: bool = True) -> GraphModule:
    """A body of two inputs that multiplies them, and may add to the first what it then multiplies."""
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    if writes:
        graph.call_function(torch.ops.aten.add_.Tensor, (a, 1))
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    graph.output(product if returns else (a,))
    return GraphModule({}, graph)


def _program(case: Case, body: nn.Module, *, keyword: bool = False) -> GraphModule:
    """A graph that reads x, calls the operator, and reads x again."""
    graph = Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.ops.aten.sin.default, (x,))
    attribute = graph.get_attr("body")
    operands, keywords = ((x,), {"b": x}) if keyword else ((x, x), {})
    call = graph.call_function(case.operator, (*case.mode, attribute, *operands), keywords)
    after = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.output((before, call, after))
    return GraphModule({"body": body}, graph)


@every_case
@pytest.mark.parametrize("keyword", [False, True])
def test_every_way_to_run_a_graph_gives_the_same(case: Case, keyword: bool) -> None:
    program, x = _program(case, _body(), keyword=keyword), torch.randn(3, 3)
    expected = (x.sin(), case.plainly(torch.mm, x, x), x.cos())
    copied = copy.deepcopy(program)
    assert copied.body is not program.body
    stored = io.BytesIO()
    torch.save(program, stored)
    ways = (
        program,
        Interpreter(program).run,
        Transformer(program).transform(),
        copied,
        symbolic_trace(program),
        pickle.loads(pickle.dumps(program)),
        torch.load(io.BytesIO(stored.getvalue()), weights_only=False),
    )
    for way in ways:
        assert all(map(torch.equal, way(x), expected))


@every_case
def test_symbolic_trace_keeps_the_call(case: Case) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return case.call(self.body, x) + 1

    model, x = Model(), torch.ones(1, 2)
    traced = symbolic_trace(model)
    (call,) = [node for node in traced.graph.nodes if node.target is case.operator]
    assert (call.args[: len(case.mode)], call.args[-1].name) == (case.mode, "x")
    assert call.args[len(case.mode)].target == "body"
    assert torch.equal(traced(x), model(x))


def test_symbolic_trace_keeps_containers_and_keywords() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _Sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hops.call(self.body, [x, (x, 2)], more={"k": x})

    traced = symbolic_trace(Model())
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [hops.call]
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 5.0))


class _Sum(nn.Module):
    def forward(self, given: Any, *, more: Any) -> Any:
        return given[0] + given[1][0] + given[1][1] + more["k"]


def test_symbolic_trace_refuses_a_function_as_body() -> None:
    with pytest.raises(RuntimeError, match="partita_call because it received an arbitrary callable"):
        symbolic_trace(lambda x: hops.call(torch.sin, x))


def test_a_pickled_graph_module_loads_in_a_process_that_has_imported_partita(tmp_path: Any) -> None:
    program = _program(CASES["autocast"], _body())
    (tmp_path / "program.pickle").write_bytes(pickle.dumps(program))
    source = f"""
import partita, pickle, torch
program = pickle.loads(open({str(tmp_path / "program.pickle")!r}, "rb").read())
print(program(torch.ones(2, 2))[1].dtype)
"""
    assert printed_by_new_process(source) == "torch.bfloat16\n"


# Printing -----------------------------------------------------------------------------------------------------------


@every_case
def test_nodes_print_with_the_name_of_the_operator(case: Case) -> None:
    program = _program(case, _body())
    (call,) = [node for node in program.graph.nodes if node.target is case.operator]
    name = f"torch.ops.higher_order.{case.operator.name()}"
    assert f"call_function[target={name}](args = (" in call.format_node()
    assert f"{name}(" in program.code
    readable = program.print_readable(print_output=False)
    assert name in readable
    assert "class body(torch.nn.Module)" in readable


def test_graphs_print_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tabulate")
    _program(CASES["autocast"], _body()).graph.print_tabular()
    assert "partita_autocast" in capsys.readouterr().out


# Dead code ----------------------------------------------------------------------------------------------------------


def _unread(case: Case, body: GraphModule) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(case.operator, (*case.mode, graph.get_attr("body"), x, x))
    graph.output(x)
    return GraphModule({"body": body}, graph)


@every_case
@pytest.mark.parametrize("returns", [True, False])
def test_dead_code_elimination_keeps_a_call_with_effects(case: Case, returns: bool) -> None:
    program, x = _unread(case, _body(writes=True, returns=returns)), torch.zeros(2, 2)
    program.graph.eliminate_dead_code()
    program.recompile()
    assert program.graph.find_nodes(op="call_function", target=case.operator)
    with torch.no_grad():
        program(x)
    assert torch.equal(x, torch.ones(2, 2))


@every_case
def test_dead_code_elimination_keeps_effects_of_nested_calls(case: Case) -> None:
    inner = Graph()
    a, b = inner.placeholder("a"), inner.placeholder("b")
    inner.call_function(hops.call, (inner.get_attr("body"), a, b))
    inner.output(b)
    program = _unread(case, GraphModule({"body": _body(writes=True)}, inner))
    program.graph.eliminate_dead_code()
    program.recompile()
    x = torch.zeros(2, 2)
    with torch.no_grad():
        program(x)
    assert torch.equal(x, torch.ones(2, 2))


# Partita's own analyses ---------------------------------------------------------------------------------------------


def _order(program: GraphModule) -> list[tuple[str, str]]:
    """The pairs of nodes that effects keep in order, by name."""
    told = Program.of(program)
    names = [node.name for node in told.index.nodes]
    return [(names[i], names[k]) for i, k in zip(told.effects.before, told.effects.after, strict=True)]


@every_case
def test_effects_order_a_call_that_writes_between_its_readers(case: Case) -> None:
    for keyword in (False, True):
        program = _program(case, _body(writes=True), keyword=keyword)
        (call,) = [node.name for node in program.graph.nodes if node.target is case.operator]
        assert {("sin_default", call), (call, "cos_default")} <= set(_order(program))


@every_case
def test_effects_leave_a_call_that_only_computes_free(case: Case) -> None:
    program = _program(case, _body())
    assert _order(program) == []
    assert Program.of(program).effects.effectful == frozenset()


@every_case
def test_effects_order_a_traced_call_before_a_later_reader(case: Case) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x.sin()
        case.call(_add_one, x)
        return before + x.cos() + y

    with torch.no_grad():
        traced = make_fx(f, tracing_mode="fake", pre_dispatch=True)(torch.ones(2), torch.ones(2))
    assert {("sin", case.operator.name()), (case.operator.name(), "cos")} <= set(_order(traced))


def _add_one(x: torch.Tensor) -> None:
    x.add_(1)


def test_effects_see_a_buffer_that_a_body_holds() -> None:
    graph = Graph()
    graph.call_function(torch.ops.aten.add_.Tensor, (graph.get_attr("seen"), 1))
    graph.output(())
    body = GraphModule({"seen": torch.zeros(2)}, graph)
    outer = Graph()
    x = outer.placeholder("x")
    outer.call_function(hops.wrap_with_set_grad_enabled, (False, outer.get_attr("body")))
    outer.output(outer.call_function(torch.ops.aten.add.Tensor, (x, outer.get_attr("seen"))))
    program = GraphModule({"body": body, "seen": body.seen}, outer)
    assert ("partita_set_grad_enabled", "add_tensor") in _order(program)


def test_effects_of_nested_calls_are_those_of_the_innermost() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(hops.wrap, (graph.get_attr("body"), a, b)))
    inner = GraphModule({"body": _body(writes=True)}, graph)
    program = _program(CASES["grad_off"], inner)
    assert ("partita_set_grad_enabled", "cos_default") in _order(program)
