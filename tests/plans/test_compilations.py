"""The compiled functions of a plan as data: for which inputs, how long it took, shared with which region."""

from __future__ import annotations

import copy
import pickle

import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, Failing, plan_of
from torch import Tensor

from partita import plan
from partita.backends import Eager
from partita.plans import CompiledBody
from partita.policies import BySize
from partita.treatments import Lower


def wave(x: Tensor, n: int) -> Tensor:
    return torch.sin(x) * n


def test_each_compiled_function_has_its_inputs_and_its_seconds() -> None:
    made = plan_of(wave, Lower(Counting()))
    module = made.apply().module()
    assert not made.compilations
    for rows in (3, 3, 4, 5):
        module(torch.randn(rows, 2), 2)
    module(torch.randn(3, 2, requires_grad=True), 2)
    assert [compiled.inputs for compiled in made.compilations] == [
        ("float32[3, 2]", "2"),
        ("float32[*, 2]", "2"),
        ("float32[*, 2] requires_grad", "2"),
    ]
    assert [compiled.gradients for compiled in made.compilations] == [False, False, True]
    assert all(compiled.is_new and compiled.seconds > 0 for compiled in made.compilations)
    assert made.compilations.seconds == sum(compiled.seconds for compiled in made.compilations)


def test_a_shared_function_names_the_region_that_it_was_compiled_for() -> None:
    program = program_of(lambda x: x.sin().exp().sin().exp())
    made = plan(program, BySize(operators=2), Lower(Counting()))
    made.apply().module()(torch.randn(2, 2))
    first, second = made.compilations
    assert (first.shared_with, second.shared_with) == (None, first.region)
    assert second.seconds == 0
    assert not second.is_new
    made.apply().module()(torch.randn(2, 2))
    assert [compiled.shared_with for compiled in made.compilations][2:] == [first.region] * 2


def test_a_region_that_runs_eagerly_has_compiled_nothing() -> None:
    made = plan_of(lambda x: x.sin(), Lower(Failing()))
    made.apply().module()(torch.randn(2))
    assert len(made.failures) == 1
    assert not made.compilations


def test_copies_and_pickles_have_lists_of_their_own() -> None:
    made = plan_of(lambda x: x.sin() + 41, Lower(Eager()))
    module = made.apply().module()
    module(torch.randn(2))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(torch.randn(2))
    assert len(made.compilations) == 1


def test_it_prints_as_lines() -> None:
    own = CompiledBody("a", "inductor", ("float32[*, 2]", "3"), gradients=True, seconds=1.25)
    assert str(own) == "a: inductor for (float32[*, 2], 3) with gradients was compiled in 1.2 s"
    shared = CompiledBody("b", "inductor", (), gradients=False, seconds=0, shared_with="a")
    assert str(shared) == "b: inductor for () is shared with 'a'"
    loaded = CompiledBody("b", "inductor", (), gradients=False, seconds=0, loaded=True)
    assert str(loaded) == "b: inductor for () was loaded"
