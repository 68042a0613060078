"""Exported programs in and out: every policy on every kind of program, in both dialects, with nothing lost."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.helpers.work import calls_during
from tests.program.exported_helpers import CASES, CUTS, Dialect, cut, original
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from partita import Program, fingerprint, inline, verify
from partita.program.exported import exported_graph

pytestmark = pytest.mark.filterwarnings("ignore")

every_case = pytest.mark.parametrize("name", CASES)
#: In eager mode these go through a compiler.
SLOW_IN_EAGER = {"cond", "loops"}
#: Cuts for all kinds of programs; the other cuts are tried on the kinds that they could break.
CUTS_OF_ALL = ("every operator", "by module", "by mode")
TRICKY = ("structures", "repeated", "only_writes", "modes", "sizes", "item", "normalised", "tied", "twice")


def _text(exported: ExportedProgram) -> str:
    """All that a program holds but its tensors."""
    entries = [(entry.fqn, str(entry.signature)) for entry in exported.module_call_graph]
    return "\n".join(
        map(str, (exported.graph, exported.graph_signature, [*exported.state_dict], [*exported.constants], entries))
    )


@pytest.mark.parametrize(
    ("name", "how"),
    slow_but(
        [(name, how) for name in CASES for how in CUTS if how in CUTS_OF_ALL or name in TRICKY],
        *product(CASES, ("every operator",)),
        *product(("repeated", "modes", "sizes"), CUTS),
    ),
)
def test_a_cut_means_the_same_and_is_undone_by_inlining(name: str, how: str) -> None:
    _check(name, how, "training")


@pytest.mark.parametrize("name", slow_but(CASES, *TRICKY))
def test_a_cut_of_a_decomposed_program_means_the_same(name: str) -> None:
    _check(name, "every operator", "decomposed")


def _check(name: str, how: str, dialect: Dialect) -> None:
    case, exported = CASES[name], original(name, dialect)
    before, owner = _text(exported), exported.graph.owning_module
    program = Program.of(exported)
    after = cut(program, how)
    result = after.exported()  # torch's verifier runs in here.
    result.validate()
    verify(program, after, case.args(), case.kwargs())
    assert list(result.state_dict) == list(exported.state_dict)
    assert all(tensor is exported.state_dict[key] for key, tensor in result.state_dict.items())
    assert all(tensor is exported.constants[key] for key, tensor in result.constants.items())
    assert result.range_constraints == exported.range_constraints
    assert result.dialect == exported.dialect
    flat = inline(after)
    assert fingerprint(flat) == fingerprint(inline(program))
    assert str(flat.exported().graph_signature) == str(exported.graph_signature) == str(result.graph_signature)
    assert _text(exported) == before
    assert exported.graph.owning_module is owner


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW_IN_EAGER])
def test_a_cut_gives_what_the_model_gives(name: str) -> None:
    case = CASES[name]
    verify(case.build(), cut(original(name), "two parts"), case.args(), case.kwargs(), other_shapes=False)


@every_case
def test_a_program_that_is_not_cut_comes_back_as_it_was(name: str) -> None:
    exported = original(name)
    result = Program.of(exported).exported()
    assert _text(result) == _text(exported)
    assert result.graph is not exported.graph


@every_case
def test_a_cut_can_be_cut_again(name: str) -> None:
    case, program = CASES[name], Program.of(original(name))
    once = cut(program, "two parts")
    twice = cut(once, "every operator")
    verify(once, twice, case.args(), case.kwargs())
    assert fingerprint(inline(twice)) == fingerprint(inline(program))
    assert str(twice.exported().graph_signature) == str(program.exported().graph_signature)


@pytest.mark.parametrize("how", slow_but(["by mode", "two parts"], "two parts"))
@every_case
def test_what_came_out_goes_in_as_the_same_program(name: str, how: str) -> None:
    after = cut(original(name), how)
    once = after.exported()
    again = Program.of(once)
    assert fingerprint(again) == fingerprint(after)
    assert _text(again.exported()) == _text(once)


@pytest.mark.parametrize("name", ["chain", "repeated", "writes_buffer", "tied", "twice", "item"])
def test_programs_that_went_through_dynamo_can_be_cut(name: str) -> None:
    case = CASES[name]
    program = Program.of(case.exported(strict=True))
    after = cut(program, "every operator")
    verify(program, after, case.args(), case.kwargs())
    assert fingerprint(inline(after)) == fingerprint(inline(program))


@pytest.mark.parametrize("name", ["modes", "writes_buffer", "cond"])
def test_modes_are_wrapped_once(name: str) -> None:
    once = cut(original(name), "by mode")
    again = cut(once, "by mode")
    assert _text(again.exported()) == _text(once.exported())


def test_one_training_step_changes_the_tensors_of_the_original() -> None:
    exported = CASES["writes_buffer"].exported()
    expected = CASES["writes_buffer"].build()
    module = cut(exported, "every operator").module()
    for model in (module, expected):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(*CASES["writes_buffer"].args()).square().sum().backward()
        optimizer.step()
    state = expected.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in exported.state_dict.items())
    assert exported.state_dict["count"].any()


def test_the_collector_rests_while_a_program_is_put_together_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, seen = original("chain"), []
    build = ExportedProgram.__init__
    monkeypatch.setattr(
        ExportedProgram, "__init__", lambda *args, **kwargs: (seen.append(gc.isenabled()), build(*args, **kwargs))[1]
    )
    Program.of(exported).exported()
    assert seen == [False]
    assert gc.isenabled()


def _calling(count: int) -> GraphModule:
    """A graph that calls so many bodies."""
    body, root, graph = Graph(), nn.Module(), Graph()
    body.output((body.placeholder("x"),))
    x = graph.placeholder("x")
    calls = []
    for number in range(count):
        setattr(root, f"body_{number}", GraphModule(nn.Module(), body))
        calls.append(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr(f"body_{number}"), x)))
    graph.output(tuple(calls))
    return GraphModule(root, graph)


def test_bodies_that_move_get_names_of_their_own() -> None:
    graph, attributes = exported_graph(_calling(12), taken=("body", "body_0_"))
    read = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    assert len(set(read)) == 12
    assert read == list(attributes)
    assert not {"body", "body_0_", "body_3"} & {*read}


def test_moving_bodies_is_no_more_work_than_their_number() -> None:
    module = _calling(2_000)
    stay, move = (calls_during(exported_graph, module, taken=taken) for taken in ((), ("body",)))
    assert move < 1.5 * stay
