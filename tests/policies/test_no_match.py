"""Policies that match nothing say so, with near matches; frames and those who allow it get no region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partita
from partita import Program
from partita.errors import NoMatchError
from partita.policies import AroundOperators, ByAnnotation, ByModule, InForward
from partita.program.program import Frame
from partita.treatments import Call


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"stage": 1}):
            for block in self.blocks:
                x = block(x)
        return x


@pytest.fixture(scope="module")
def program() -> Program:
    return partita.capture(_Model(), (torch.randn(2, 4),))


CASES: list[tuple[Any, str]] = [
    (ByModule("layers.*"), "modules called in it: 'blocks.0'"),
    (ByModule("block.0"), "did you mean 'blocks.0'"),
    (ByModule(classes="Linaer"), "did you mean 'Linear'"),
    (ByModule(lambda path: False), "modules called in it: 'blocks.0'"),
    (AroundOperators("aten.linaer"), "did you mean .*linear"),
    (AroundOperators(torch.nn.functional.scaled_dot_product_attention), "operators called in it: 'aten.linear'"),
    (AroundOperators("elu"), "did you mean 'aten.relu'"),
    (AroundOperators("linear"), "did you mean 'aten.linear'"),
    (ByAnnotation("stages"), "did you mean 'stack_trace'|matches no annotation"),
]


@pytest.mark.parametrize(
    ("policy", "hint"), CASES, ids=[f"{type(policy).__name__}{at}" for at, (policy, _) in enumerate(CASES)]
)
def test_a_policy_without_a_match_is_an_error_with_near_matches(program: Program, policy: Any, hint: str) -> None:
    with pytest.raises(NoMatchError, match=hint) as raised:
        partita.plan(program, policy, Call())
    assert type(policy).__name__ in str(raised.value)
    assert "allow_empty=True" in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "regions"),
    [
        (ByModule("layers.*", allow_empty=True), 0),
        (AroundOperators("aten.absent", allow_empty=True), 1),
        (ByAnnotation("absent", allow_empty=True), 0),
    ],
    ids=repr,
)
def test_who_means_it_gets_what_is_left(program: Program, policy: Any, regions: int) -> None:
    decided = partita.plan(program, policy, Call())
    assert len(decided.partition) == regions
    partita.verify(program, decided.apply(), (torch.randn(2, 4),))


def test_the_error_shows_the_options_that_were_given(program: Program) -> None:
    with pytest.raises(NoMatchError, match=r"^AroundOperators\(operators=\('elu',\), min_size=2\) matches no operator"):
        partita.plan(program, AroundOperators("elu", min_size=2), Call())


def test_a_program_without_operators_has_no_match_either() -> None:
    with pytest.raises(NoMatchError, match="modules called in it: none"):
        ByModule("layers.*")(partita.capture(nn.Identity(), (torch.randn(2),)))


def test_a_frame_of_a_model_need_not_match(program: Program) -> None:
    frame = Program(program.graph_module, frame=Frame())
    assert len(ByModule("layers.*")(frame)) == 0
    assert len(ByAnnotation("absent")(frame)) == 0


def test_the_forward_of_a_joint_graph_is_searched_too() -> None:
    joint = partita.capture_joint(_Model(), (torch.randn(2, 4),))
    with pytest.raises(NoMatchError, match=r"blocks\.0"):
        InForward(ByModule("layers.*"))(joint)


@pytest.mark.parametrize("make", [lambda: ByModule("x", allow_empty=1), lambda: ByAnnotation("x", allow_empty=None)])
def test_allow_empty_is_a_truth_value(make: Any) -> None:
    with pytest.raises(partita.errors.OptionError, match="allow_empty is True or False"):
        make()


def test_a_word_in_the_name_of_an_operator_suggests_it() -> None:
    q = torch.randn(1, 2, 4)
    program = partita.capture(lambda q: nn.functional.scaled_dot_product_attention(q, q, q).tanh(), (q,))
    with pytest.raises(NoMatchError, match=r"did you mean 'aten\.scaled_dot_product_attention'\?"):
        AroundOperators("attention")(program)
    assert len(AroundOperators("aten.scaled_dot_product_attention")(program)) == 2
