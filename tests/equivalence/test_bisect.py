"""Bisection: planted faults are found, in few runs, down to the operators."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita
from partita.errors import OptionError
from partita.policies import ByLabel, BySize
from partita.treatments import Call, Lower

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Chain(nn.Module):
    """Many small operators, all different in effect; `exp` stands at one place."""

    def __init__(self, length: int, exp_at: int) -> None:
        super().__init__()
        self.length, self.exp_at = length, exp_at

    def forward(self, x: Tensor) -> Tensor:
        for at in range(self.length):
            x = torch.exp(x).clamp(max=2) if at == self.exp_at else torch.tanh(x)
        return x


def _chain(length: int = 24, exp_at: int = 13) -> partita.Program:
    return partita.Program.of(torch.fx.symbolic_trace(Chain(length, exp_at)))


def _is_exp(node: Node) -> bool:
    return node.target is torch.exp


@dataclass(frozen=True)
class WrongExp:
    """A treatment that is wrong for one operator."""

    def treat(self, body: GraphModule) -> nn.Module:
        for node in body.graph.nodes:
            if _is_exp(node):
                node.target = torch.exp2
        body.recompile()
        return body


@dataclass(frozen=True)
class WrongExpBackend:
    """A backend that is wrong for one operator."""

    name: str = "wrong_exp"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Any:
        wrong = WrongExp().treat(body)
        return lambda *args: wrong(*args)


@dataclass(frozen=True)
class Raises:
    name: str = "raises"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Any:
        if any(map(_is_exp, body.graph.nodes)):
            raise ValueError("no code for exp")
        return lambda *args: body(*args)


class _Noise(nn.Module):
    numbers = itertools.count(1)

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda x: x + 1e-3 * next(self.numbers), self.body(*args))


@dataclass(frozen=True)
class Noisy:
    """Each call returns something else."""

    def treat(self, body: GraphModule) -> nn.Module:
        return _Noise(body) if any(map(_is_exp, body.graph.nodes)) else body


@dataclass(frozen=True)
class Kills:
    def treat(self, body: GraphModule) -> nn.Module:
        if any(map(_is_exp, body.graph.nodes)):
            os.kill(os.getpid(), 9)
        return body


def _assert_found(found: partita.Bisection) -> None:
    (region,) = found.regions
    assert any(map(_is_exp, region.nodes))
    assert not found.comparison.equal


@pytest.mark.parametrize(
    "treatment", [WrongExp(), Lower(WrongExpBackend()), Noisy()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("exp_at", [0, 123, 199])
def test_a_fault_in_two_hundred_regions_is_found_in_twelve_runs(treatment: Any, exp_at: int) -> None:
    program = _chain(200, exp_at)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    label = {node: str(nodes.index(node)) for node in nodes if node.target is not torch.clamp}
    plan = partita.plan(program, ByLabel(lambda node: label.get(node)), treatment)
    assert len(plan.partition) >= 200
    found = partita.bisect(plan, (X,), gradients=False, second_call=False, no_grad_call=False)
    _assert_found(found)
    assert found.blame == "region"
    assert found.runs <= 12


def test_the_operator_inside_of_a_region_is_found() -> None:
    plan = partita.plan(_chain(), BySize(parts=3), Lower(WrongExpBackend()))
    found = partita.bisect(plan, (X,))
    _assert_found(found)
    assert [node.target for node in found.nodes] == [torch.exp]
    text = str(found)
    assert "treated by Lower(" in text
    assert "1 of its 8 nodes" in text
    assert "value of output" in text


def test_operators_that_differ_together_are_found_as_a_run() -> None:
    """What is wrong only where `exp` and the `clamp` behind it are in one body."""

    @dataclass(frozen=True)
    class WrongPair:
        def treat(self, body: GraphModule) -> nn.Module:
            names = [node.name for node in body.graph.nodes]
            return WrongExp().treat(body) if "clamp" in names and "exp" in names else body

    found = partita.bisect(partita.plan(_chain(), BySize(parts=2), WrongPair()), (X,))
    assert [node.name for node in found.nodes] == ["exp", "clamp"]


def test_regions_that_differ_only_together_are_found() -> None:
    program = partita.Program.of(torch.fx.symbolic_trace(Chain(12, 5)))
    plan = partita.plan(program, BySize(parts=6), Call())
    shared: dict[str, Tensor] = {}

    class Writes(nn.Module):
        def __init__(self, body: GraphModule) -> None:
            super().__init__()
            self.body = body

        def forward(self, *args: Any) -> Any:
            shared["seen"] = args[0]
            return self.body(*args)

    class Reads(Writes):
        def forward(self, *args: Any) -> Any:
            found = self.body(*args)
            return found + shared.pop("seen") if shared else found

    @dataclass(frozen=True)
    class Becomes:
        module: type[nn.Module]

        def treat(self, body: GraphModule) -> nn.Module:
            shared.clear()
            return self.module(body)

    names = [region.name for region in plan.partition]
    by_name: dict[str, Any] = {**dict.fromkeys(names, Call()), names[1]: Becomes(Writes), names[4]: Becomes(Reads)}
    options: Any = {"gradients": False, "second_call": False, "no_grad_call": False}
    found = partita.bisect(partita.plan(program, plan.partition, by_name), (X,), **options)
    assert found.blame == "combination"
    assert [region.name for region in found.regions] == [names[1], names[4]]


def test_a_failed_compilation_counts_where_nothing_else_differs() -> None:
    found = partita.bisect(partita.plan(_chain(), BySize(parts=4), Lower(Raises())), (X,))
    _assert_found(found)
    assert [node.target for node in found.nodes] == [torch.exp]
    assert "no code for exp" in str(found)


def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each trial has a plan of its own, with the same failure."""
    plan = partita.plan(_chain(), BySize(parts=4), Lower(Raises()))
    partita.bisect(plan, (X,))
    with pytest.raises(partita.errors.VerificationError):
        partita.verify(_chain(exp_at=12), plan.apply(), (X,))
    found = [record.getMessage() for record in caplog.records if "no code for exp" in record.getMessage()]
    assert len(found) == 2


def test_an_exception_of_a_treatment_counts() -> None:
    found = partita.bisect(partita.plan(_chain(), BySize(parts=4), Lower(Raises(), strict=True)), (X,))
    assert [node.target for node in found.nodes] == [torch.exp]


def test_a_region_that_kills_the_process_is_found_in_processes_of_their_own() -> None:
    plan = partita.plan(_chain(), BySize(parts=4), Kills())
    found = partita.bisect(plan, (X,), isolate=True, second_call=False, no_grad_call=False)
    assert [node.target for node in found.nodes] == [torch.exp]
    assert "crash of the process" in str(found)
    assert "SIGKILL" in str(found)


def test_an_exception_that_only_parts_raise_is_not_the_fault() -> None:
    """The treatment is wrong for `exp`, and does not take small regions."""

    @dataclass(frozen=True)
    class WrongWhereWhole:
        def treat(self, body: GraphModule) -> nn.Module:
            if sum(node.op == "call_function" for node in body.graph.nodes) < 4:
                raise ValueError("a part of the region")
            return WrongExp().treat(body)

    found = partita.bisect(partita.plan(_chain(6, 3), BySize(parts=1), WrongWhereWhole()), (X,))
    assert found.blame == "region"
    assert len(found.nodes) >= 4
    assert "exp" in {node.name for node in found.nodes}
    assert {difference.kind for difference in found.comparison.differences} <= {"value", "gradient"}


def test_parts_put_modes_back_as_the_plan_does() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(graph.call_function(torch.exp, (graph.call_function(torch.sin, (x,)),)))
    program = partita.Program.of(GraphModule({}, graph))
    plan = partita.plan(program, BySize(parts=2), Call())
    options: Any = {"gradients": False, "second_call": False, "no_grad_call": False}
    found = partita.bisect(partita.Plan(plan.partition, plan.treatments, True), (X,), **options)
    assert found.blame == "cut"
    assert {difference.kind for difference in found.comparison.differences} == {"mode"}


def test_a_plan_that_differs_in_nothing() -> None:
    found = partita.bisect(partita.plan(_chain(), BySize(parts=4), Call()), (X,))
    assert (found.blame, found.regions, found.runs) == ("nothing", (), 1)
    assert str(found).startswith("nothing differs (1 run)")
    with pytest.raises(OptionError, match="no single region"):
        found.reproduce("nowhere")


def test_a_program_that_differs_from_itself_is_told_apart() -> None:
    numbers = itertools.count()

    def odd(x: Tensor) -> Tensor:
        return x + next(numbers)

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(odd, (graph.call_function(torch.sin, (x,)),)))
    program = partita.Program.of(GraphModule({}, graph))
    found = partita.bisect(partita.plan(program, BySize(parts=2), Call()), (X,))
    assert found.blame == "program"
    assert "differs from itself" in str(found)
