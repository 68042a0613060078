"""Plans with several treatments over generated programs, and what the generator has for them: nothing differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita
from partita import Program
from partita.equivalence import Comparison, Difference
from partita.policies import ByLabel
from partita.testing import Case, Features, Input, LawError, Recipe, Step, build, random_case, random_crossing
from partita.testing.fuzz import fuzz
from partita.testing.laws import treatments as mixed_laws
from partita.testing.laws.treatments import check_lower_laws, check_mixed_law
from partita.treatments import Call, Lower, Mode, Recompute


@pytest.mark.parametrize("first", [0, 12])
def test_programs_with_several_treatments_are_the_same(first: int) -> None:
    tally = fuzz(first, 12, mixed="aot_eager")
    assert tally.broken == ()
    assert tally.legal > 3


def test_all_treatments_turn_up() -> None:
    found = [
        type(one) for seed in range(12) for one in check_mixed_law(random_crossing(seed), "eager", seed)[0].treatments
    ]
    assert set(found) == {Call, Lower, Mode, Recompute}


def test_a_broken_law_tells_the_program_and_the_treatments() -> None:
    def check() -> None:
        for seed in range(60):
            check_mixed_law(random_case(seed, features=Features.only("methods")), Negating(), seed)

    with pytest.raises(LawError, match=r"several treatments(.|\n)*random_case(.|\n)*Lower(.|\n)*value of"):
        check()


class Twice(nn.Module):
    """Calls one batch norm twice; autograd saves its statistics for both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(x)
        return self.norm(first)


@pytest.mark.parametrize("first", [Call(), None])
def test_the_law_allows_that_autograd_counts_the_statistics_of_a_norm_that_is_lowered_once(
    first: Call | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(torch.fx.symbolic_trace(Twice()), (torch.randn(4, 3, requires_grad=True),), {})
    labels = {"norm_1": "lowered"} if first is None else {"norm": "called", "norm_1": "lowered"}
    treatments = {"called": first, "lowered": Lower("aot_eager")} if first else Lower("aot_eager")
    chosen = partita.plan(Program.of(case.graph_module), ByLabel(lambda node: labels.get(node.name)), treatments)
    monkeypatch.setattr(mixed_laws, "random_mixture", lambda *_, **__: (chosen, chosen.apply()))
    check_mixed_law(case, "aot_eager", 0)


def test_the_law_allows_gradients_that_differ_only_by_the_rounding_of_terms_that_cancel() -> None:
    case = random_case(200209)
    check_lower_laws(case, "aot_eager", 200209)


def test_a_wrong_gradient_is_wrong_in_double_precision_too() -> None:
    case = random_case(3, features=Features.only("methods"))

    def compared(double: Case) -> Comparison:
        assert all(leaf.dtype is torch.float64 for leaf in double.args if isinstance(leaf, Tensor))
        return Comparison((wrong,))

    wrong = Difference("gradient", "x", "1.0 != 2.0")
    assert not mixed_laws._are_rounding([wrong], case, compared)
    assert not mixed_laws._are_rounding([Difference("value", "x", "1.0 != 2.0")], case, compared)


@dataclass(frozen=True)
class Negating:
    """Takes everything, and gives zeros and ones that have nothing to do with what the body gives."""

    name: ClassVar[str] = "negating"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *values: tuple(value.logical_not().to(value.dtype) for value in body(*values))


@pytest.mark.parametrize("kind", ["hooks.result", "hooks.mutated", "hooks.view"])
def test_hooks_change_the_gradients_that_a_comparison_sees(kind: str) -> None:
    steps = (Step("methods.unary", (0, 2, 0, 0)), Step(kind, (0, 1, 0, 0)), Step("methods.unary", (0, 1, 0, 0)))
    hooked = build(Recipe(inputs=(Input("leaf"),), steps=steps))
    graph = hooked.copy().graph_module
    for node in [node for node in graph.graph.nodes if "gradient" in node.name]:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    args = tuple(torch.randn(4, 6, requires_grad=True) for _ in hooked.args)
    found = partita.compare(Program.of(hooked.graph_module), graph, args)
    assert {difference.kind for difference in found.differences} == {"gradient"}
