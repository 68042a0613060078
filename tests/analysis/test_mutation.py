"""Later writes: who writes to the memory of a region's values, in the graph as it was when its program was made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

import partita
from partita import Program, Region
from partita.analysis.effects import calls
from partita.analysis.effects.calls import Storages
from partita.lowering.lower import names_mutated_later
from partita.plans.memory import saved_bytes_of
from partita.policies import ByLabel
from partita.program.joint import _mutated
from partita.program.program import mutated_positions, tensors_with_hooks
from partita.program.saved_tensors import saved_tensors_of
from partita.treatments import Recompute

ATEN = torch.ops.aten


def test_a_new_program_of_an_edited_graph_sees_the_edit() -> None:
    """As many nodes as before, and the last one writes now."""
    graph = Graph()
    x = graph.placeholder("x")
    square = graph.call_function(torch.mul, (x, x))
    times = graph.call_method("mul", (square, 3))
    graph.output(times)
    module = GraphModule(nn.Module(), graph)
    found = Program.of(module).mutations
    assert found.names_mutated_outside([square]) == found.names_mutated([square]) == frozenset()
    assert found.mutators_of(square) == found.mutating_nodes() == ()
    assert found.later_mutators([x], [square]) == {}
    times.target = "mul_"
    found = Program.of(module).mutations
    assert found.names_mutated_outside([square]) == found.names_mutated([square]) == {square.name}
    assert found.mutators_of(square) == found.mutating_nodes() == (times.name,)
    times.args = (x, 3)
    found = Program.of(module).mutations
    assert found.names_mutated_outside([square]) == frozenset()
    assert found.later_mutators([x], [square]) == {x: times.name}


def test_order_and_mutations_follow_from_one_analysis_and_may_be_asked_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller may pass one tensor twice, which orders `sin` after `add_`, but makes `y` no tensor that is mutated."""
    made: list[Storages] = []
    monkeypatch.setattr(calls, "_join_attributes", lambda storages, _: made.append(storages))
    module = symbolic_trace(lambda x, y: (x.add_(1), y.sin()))
    for asks_order_first in (True, False):
        program = Program.of(module)
        if asks_order_first:
            assert program.effects.effectful
        assert program.mutations.mutators_of(program.node("y")) == ()
        (edge,) = program.effects.edges()
        assert [program.index.nodes[number].name for number in edge] == ["add_", "sin"]
        assert program.once(mutated_positions) == (0,)
        assert program.once(tensors_with_hooks) == ()
    assert len(made) == 2


def test_each_source_has_the_first_writer_behind_its_first_reader_that_is_outside() -> None:
    graph = Graph()
    a, b, c, d = (graph.placeholder(name) for name in "abcd")
    graph.call_function(ATEN.add_.Tensor, (a, 1), name="early")
    read_a = graph.call_function(ATEN.mul.Tensor, (a, b))
    inside = graph.call_function(ATEN.add_.Tensor, (b, 1), name="inside")
    graph.call_function(ATEN.add_.Tensor, (c, 1), name="before_c")
    read_c = graph.call_function(ATEN.mul.Tensor, (c, d))
    graph.call_function(ATEN.add_.Tensor, (b, 1), name="late")
    graph.call_function(ATEN.add_.Tensor, (b, 1), name="later")
    graph.output((read_a, read_c))
    module = GraphModule(nn.Module(), graph)
    found = Program.of(module).mutations
    nodes = (read_c, inside, read_a)  # In any order.
    assert found.later_mutators((a, b, c, d), nodes) == {b: "late"}
    assert found.later_mutators((c,), (read_a, inside)) == {}  # Nobody reads it there.
    assert found.names_mutated((a, d, inside)) == {"a", "inside"}
    assert found.names_mutated_outside((inside, read_a)) == {"inside"}
    assert found.reads_of_mutated_inputs((read_a, inside, read_c)) == [read_a]
    assert found.mutating_nodes() == ("early", "inside", "before_c", "late", "later")
    assert names_mutated_later(module, Region("r", nodes)) == {"b", "inside"}


# Growth: what is asked of one region takes as long as the region, and not as the program ------------------------------


def _many_inputs(count: int) -> GraphModule:
    """Each of many inputs is read in one region, and written behind it."""
    graph = Graph()
    x, *sources = (graph.placeholder(f"x{place}") for place in range(count + 1))
    for source in sources:
        x = graph.call_function(ATEN.add.Tensor, (x, source))
    for source in sources:
        graph.call_function(ATEN.mul_.Tensor, (source, 2))
    graph.output(x)
    return GraphModule(nn.Module(), graph)


class _Visits:
    """How often the inputs of any node are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        asked: Any = Node.all_input_nodes
        monkeypatch.setattr(Node, "all_input_nodes", property(lambda node: self._counted(asked.fget(node))))

    def _counted(self, given: Any) -> Any:
        self.count += 1
        return given


def test_many_sources_are_looked_up_in_one_pass_over_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _many_inputs(200)
    program = Program.of(module)
    region = Region("r", tuple(module.graph.find_nodes(op="call_function", target=ATEN.add.Tensor))).of(program)
    sources, mutations = region.inputs(), program.mutations
    visits = _Visits(monkeypatch)
    assert len(mutations.later_mutators(sources, region.nodes)) == 200
    assert visits.count == 200
    names_mutated_later(module, region)
    assert visits.count == 200 + 2 * 200  # One pass for the inputs of the region, one for their writers.


def _many_regions(count: int) -> Program:
    """Each region writes a buffer of its own."""
    root, graph = nn.Module(), Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, device="meta", requires_grad=True)
    for place in range(count):
        root.register_buffer(f"buffer{place}", torch.zeros(2, device="meta"))
        buffer = graph.get_attr(f"buffer{place}")
        written = graph.call_function(ATEN.add_.Tensor, (buffer, 1.0))
        x = graph.call_function(ATEN.sin.default, (graph.call_function(ATEN.mul.Tensor, (x, written)),))
    graph.output(x)
    return Program.of(GraphModule(root, graph))


def _lines_run(function: Callable[[], Any]) -> int:
    """How many lines of Python run, a clock that always tells the same."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def _asked_of_each_region(count: int) -> list[int]:
    program = _many_regions(count)
    labels = {node.name: place // 3 for place, node in enumerate(program.operators())}
    plan = partita.plan(program, ByLabel(lambda node: labels[node.name]), Recompute())
    known = saved_tensors_of(program)
    assert known.reason is None
    mutations = program.mutations  # From here on it is known who writes.
    region = plan.partition.regions[count // 2]
    return [
        _lines_run(lambda: mutations.names_mutated(region.nodes)),
        _lines_run(lambda: mutations.reads_of_mutated_inputs(region.nodes)),
        _lines_run(lambda: mutations.names_mutated_outside(region.nodes)),
        _lines_run(lambda: saved_bytes_of(region, known)),
    ]


def test_a_region_does_not_pay_for_the_writes_of_all_others() -> None:
    assert _asked_of_each_region(5) == _asked_of_each_region(50)


def test_inputs_that_a_joint_graph_writes_are_found_by_what_they_are_called() -> None:
    compared: list[str] = []

    class Described:
        def __init__(self, name: str) -> None:
            self.name, self.mutated_input = name, self

        def __eq__(self, other: object) -> bool:
            compared.append(self.name)
            return isinstance(other, Described) and other.name == self.name

        def __hash__(self) -> int:
            return hash(self.name)

    graph = Graph()
    inputs = [graph.placeholder(f"x{place}") for place in range(100)]
    for node in inputs[1:]:
        node.meta["desc"] = Described(node.name)
    output = graph.output(tuple(inputs))
    output.meta["desc"] = [Described(node.name) for node in reversed(inputs[1:])] + [object()]
    assert _mutated(output, inputs) == tuple(reversed(inputs[1:]))
    assert len(compared) < 200


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("to", lambda x: x.to(torch.float32, copy=True)),
        ("clone", lambda x: x.clone()),
        ("reshape", lambda x: x.reshape(-1)),
        ("dropout", lambda x: torch.nn.functional.dropout(x)),
        ("einsum", lambda x: torch.einsum("ij->ji", x)),
        ("local_response_norm", lambda x: torch.nn.functional.local_response_norm(x, 2)),
        ("getitem", lambda x: x[[1, 0]]),
        ("resolve_conj", lambda x: x.resolve_conj()),
    ],
)
def test_a_possible_copy_of_a_buffer_that_is_mutated_later_is_saved(name: str, reads: Callable[..., Any]) -> None:
    def function(x: Tensor, buffer: Tensor) -> Tensor:
        read = reads(buffer)
        result = x * read
        buffer.mul_(3)
        return result

    found = Program.of(torch.fx.symbolic_trace(function)).mutations
    assert name in found.saved_when_compiled


@pytest.mark.parametrize(
    "view", [lambda x: x.view(-1), lambda x: x[:1], lambda x: x.t(), lambda x: torch.chunk(x, 2)[0]]
)
def test_a_view_of_a_buffer_computes_nothing(view: Callable[..., Any]) -> None:
    def function(x: Tensor, buffer: Tensor) -> Tensor:
        seen = view(buffer)
        buffer.mul_(3)
        return x + seen

    found = Program.of(torch.fx.symbolic_trace(function)).mutations
    assert found.saved_when_compiled == frozenset(("mul_",))
