"""State that a call adds to a module is compared, shared with nothing that the other program sees, and taken back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.equivalence import compare


class Model(nn.Module):
    """A module whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[..., Any], inside: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.later: Tensor | None = None
        self.seen: dict[str, list[Tensor]] = defaultdict(list)
        self.inside = inside
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        self._forward(self, x)
        return (x if self.inside is None else self.inside(x)) * self.weight


def nothing(model: Any, x: Tensor) -> None:
    pass


def sets(model: Any, x: Tensor) -> None:
    model.cache = x.detach() * 1


def fills(model: Any, x: Tensor) -> None:
    model.later = x.detach() * 1


def registers(model: Any, x: Tensor) -> None:
    model.register_buffer("mean", x.detach() * 1)


def learns(model: Any, x: Tensor) -> None:
    model.bias = nn.Parameter(x.detach() * 1)


def appends(model: Any, x: Tensor) -> None:
    model.seen["x"].append(x.detach() * 1)


def builds(model: Any, x: Tensor) -> None:
    model.norm = nn.LayerNorm(3)


def keeps(model: Any, x: Tensor) -> None:
    model.cache = x


CASES: dict[str, tuple[Callable[..., None], str]] = {
    "attribute": (sets, "attribute 'cache'"),
    "attribute that was None": (fills, "attribute 'later'"),
    "buffer": (registers, "buffer 'mean'"),
    "parameter": (learns, "parameter 'bias'"),
    "member of a container": (appends, "attribute \"seen['x'][0]\""),
    "module": (builds, "parameter 'norm.bias'"),
}


def found(before: Callable[..., object], after: Callable[..., object], **options: Any) -> set[tuple[str, str]]:
    result = compare(before, after, (torch.rand(3),), **options)
    return {(difference.kind, difference.where) for difference in result.differences}


@pytest.mark.parametrize("case", CASES)
def test_state_that_only_one_program_adds_is_found_and_taken_back(case: str) -> None:
    adds, label = CASES[case]
    for one, other in ((adds, nothing), (nothing, adds)):
        before, after = Model(one), Model(other)
        assert ("structure", label) in found(before, after)
        for model in (before, after):
            assert not model.seen.get("x")
            assert set(vars(model)) == set(vars(Model(nothing)))
            assert model.later is None
    assert found(Model(adds), Model(adds)) == set()


def test_the_values_of_what_both_programs_add_are_compared() -> None:
    def doubles(model: Any, x: Tensor) -> None:
        model.cache = x.detach() * 2

    assert found(Model(sets), Model(doubles)) == {("value", "attribute 'cache'")}


def test_whether_what_is_added_shares_memory_is_compared() -> None:
    assert ("aliasing", "attribute 'cache'") in found(Model(keeps), Model(sets))


def test_each_call_is_compared_by_what_it_left() -> None:
    def adds(model: Any, x: Tensor, *, first: float) -> None:
        model.cache = model.cache * 0 + 5 if hasattr(model, "cache") else torch.full((3,), first)

    both = [Model(lambda model, x, first=first: adds(model, x, first=first)) for first in (1.0, 2.0)]
    (difference,) = compare(*both, (torch.rand(3),)).differences
    assert (difference.where, difference.when) == ("attribute 'cache'", "first call")


def test_a_cache_that_carries_gradients_is_compared_with_its_gradients() -> None:
    def carries(model: Any, x: Tensor, *, cut: bool) -> None:
        model.cache = x * (model.weight.detach() if cut else model.weight)

    both = [Model(lambda model, x, cut=cut: carries(model, x, cut=cut)) for cut in (False, True)]
    assert found(both[0], both[0]) == set()
    assert ("gradient", "'weight'") in found(*both)


def test_a_module_under_another_name_adds_the_same() -> None:
    inside = Model(sets)
    shared = Model(nothing, inside)
    for other in (nn.Sequential(shared), torch.compile(shared, backend="eager"), lambda x: shared(x)):
        assert found(shared, other) == set()


def test_what_is_only_in_the_other_program_may_keep_what_it_likes() -> None:
    """A delegate allocates its workspace in the first call."""

    class Delegate(nn.Module):
        workspace: Tensor | None = None

        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, *args: Any) -> Any:
            self.workspace = torch.zeros(3)
            return self.body(*args)

    class Delegated:
        def treat(self, body: Any) -> nn.Module:
            return Delegate(body)

    program = partita.Program.of(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh())))
    treatment: Any = Delegated()
    after = partita.plan(program, partita.policies.BySize(parts=1), treatment).apply()
    assert compare(program, after, (torch.rand(3),)).equal
