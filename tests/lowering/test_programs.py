"""Lowering over generated and captured programs: whatever the regions are, nothing differs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import partita
from partita import Partition, Program
from partita.analysis.tolerance import Tolerance
from partita.errors import CycleError
from partita.policies import ByCapability, ByLabel
from partita.testing import CAPTURES, Case, LawError, captured_case, labelled_programs, random_case, random_labels
from partita.testing.fuzz import fuzz
from partita.testing.generator.build import random_crossing
from partita.testing.laws.treatments import check_lower_laws, refuses_some_gradient
from partita.treatments import Lower

#: Sums of gradients run in another order where a region is one node of autograd.
ROUNDING = Tolerance(rounding=torch.finfo(torch.float64).eps)


def by_label_and_mode(program: Program, labels: Mapping[str, Any]) -> Partition:
    """The regions of these labels, cut where the mode changes."""
    numbers, modes = program.index.number, program.modes
    seen: dict[Any, int] = {}

    def label(node: Node) -> str | None:
        chosen = labels.get(node.name)
        return None if chosen is None else f"{chosen} {seen.setdefault(modes.at(numbers[node]), len(seen))}"

    return ByLabel(label)(program)


def differences(case: Case, labels: Mapping[str, Any], backend: str) -> str | None:
    """What differs once a program is lowered; None if these labels are no legal regions."""
    program = Program.of(case.graph_module)
    try:
        decided = partita.plan(program, by_label_and_mode(program, labels), Lower(backend))
    except CycleError:
        return None
    after = decided.apply()
    tolerance = after.tolerance | ROUNDING if backend != "eager" else after.tolerance
    found = partita.compare(program, after, case.args, case.kwargs, tolerance=tolerance)
    return "" if found.equal else f"{case.origin}\n{found}\n{list(decided.failures)}"


@pytest.mark.parametrize("seed", [3, 9, 28, 45, 49, 57, 81])
def test_generated_programs_are_the_same_in_regions_that_run_eagerly(seed: int) -> None:
    case = random_case(seed)
    assert not differences(case, random_labels(case.graph_module.graph, seed), "eager")


@pytest.mark.parametrize("seed", [7, 9, 28, 49, 71, 79, 89, 128, 224, 369, 474, 559])
def test_generated_programs_are_the_same_in_regions_that_are_traced(seed: int) -> None:
    case = random_case(seed)
    assert differences(case, random_labels(case.graph_module.graph, seed), "aot_eager") == ""


@pytest.mark.parametrize("seed", [4, 26, 37])
def test_generated_programs_are_the_same_whatever_is_refused(seed: int) -> None:
    lowering = check_lower_laws(random_case(seed), "aot_eager", seed)
    assert len(lowering.partition)
    assert all("it calls an unknown function" in failure.reason for failure in lowering.failures)


def test_a_broken_law_tells_the_program_and_the_regions() -> None:
    with pytest.raises(LawError, match=r"lowered by doubling(.|\n)*random_case\(20\)(.|\n)*doubling_\d(.|\n)*value of"):
        check_lower_laws(random_case(20), Doubling(), 20)


def test_the_law_allows_that_autograd_counts_the_statistics_of_a_norm_that_is_lowered_once() -> None:
    # Of two calls of a batch norm the second is compiled; torch.compile of that call alone does the same.
    lowering = check_lower_laws(random_case(50451), "aot_eager", 50451)
    program = lowering.program
    placed = [lowering.partition.owner[program.index.number[program.node(name)]] >= 0 for name in ("batch", "batch_1")]
    assert placed == [False, True]


@dataclass(frozen=True)
class Doubling:
    """Gives twice what the body gives."""

    name: ClassVar[str] = "doubling"

    def refusal(self, node: Node) -> str | None:
        return None if node.op == "call_function" and node.target is torch.sin else "no sine"

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *values: tuple(value * 2 for value in body(*values))


def test_a_region_may_reach_a_value_whose_gradient_autograd_refuses() -> None:
    """Its backward is one, and passes zeros to inputs that are independent of the loss."""
    assert refuses_some_gradient(random_crossing(801254))
    assert not refuses_some_gradient(random_case(7))
    check_lower_laws(random_crossing(801254), "aot_eager", 801254)


def test_the_fuzzer_counts_what_was_compiled() -> None:
    tally = fuzz(50_000, 3, lower="aot_eager")
    assert (tally.tried, tally.broken) == (3, ())
    assert 0 < tally.legal <= 3


SOME = [("Attention", "export_dynamic"), ("Buffered", "dynamo"), ("Frozen", "export"), ("Structured", "symbolic_trace")]


@pytest.mark.parametrize("capture", SOME, ids="-".join)
def test_captured_programs_are_the_same(capture: tuple[str, str]) -> None:
    check_captured(captured_case(*capture))


@pytest.mark.fuzz
@pytest.mark.parametrize("capture", CAPTURES, ids="-".join)
def test_all_captured_programs_are_the_same(capture: tuple[str, str]) -> None:
    check_captured(captured_case(*capture))


def check_captured(case: Case) -> None:
    operators = [node for node in case.graph_module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    labels = {node.name: place * 3 // len(operators) for place, node in enumerate(operators)}
    assert differences(case.copy(), labels, "aot_eager") == ""


@pytest.mark.fuzz
@given(labelled_programs(max_nodes=40))
@settings(max_examples=300)
def test_many_generated_programs_are_the_same(labelled: tuple[Case, Any]) -> None:
    case, labels = labelled
    assert not differences(case, labels, "eager")


class Step(nn.Module):
    """Everything at once: state, a mutation, random numbers, a view, a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += x.shape[0]
        scale = x.abs().mean(-1, keepdim=True) + 1
        hidden = torch.nn.functional.dropout(self.norm(self.linear(x)).relu(), 0.3, self.training)
        return (hidden / scale).transpose(0, 1), hidden.sum() / x.shape[0]


def test_inductor_compiles_a_region_once_for_all_sizes(caplog: pytest.LogCaptureFixture) -> None:
    program = partita.capture(Step(), (torch.randn(5, 8),), dynamic_shapes=({0: torch.export.Dim("b", min=2)},))
    decided = partita.plan(program, ByCapability("inductor"), Lower("inductor"))
    after = decided.apply()
    with caplog.at_level("INFO", logger="partita.lowering"):
        for size in (5, 7):
            partita.verify(program, after, (torch.randn(size, 8, requires_grad=True),), no_grad_call=False)
    assert not decided.failures
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if line.startswith("compiled")]) == len(decided.partition) == 1


def test_inductor_takes_apart_a_dict_that_comes_in_whole() -> None:
    graph = Graph()
    given = graph.placeholder("given")
    graph.output(graph.call_function(torch.sin, (graph.call_function(operator.getitem, (given, "x")),)))
    program = Program.of(GraphModule({}, graph))
    decided = partita.plan(program, ByLabel(lambda node: "whole"), Lower("inductor"))
    partita.verify(program, decided.apply(), ({"x": torch.randn(3)},))
    assert not decided.failures
