"""Two programs that differ in one aspect are distinguished by exactly that aspect; equal ones are equal."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from partita.equivalence import Comparison, Difference, Tolerance, compare, verify
from partita.errors import OptionError, VerificationError

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Result:
    loss: Tensor
    name: str


class Model(nn.Module):
    """A module whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(3))
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def pair(before: Callable[..., Any], after: Callable[..., Any]) -> tuple[Model, Model]:
    """Two models that share their state."""
    one, other = Model(before), Model(after)
    other.weight, other.count = one.weight, one.count
    return one, other


def kinds(before: Callable[..., Any], after: Callable[..., Any], *args: Any, **options: Any) -> set[str]:
    return {difference.kind for difference in compare(*pair(before, after), args, **options).differences}


def vector() -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0])


def leaf() -> Tensor:
    return vector().requires_grad_()


def counted(model: Any, x: Tensor, times: int = 1) -> Tensor:
    for _ in range(times):
        model.count.add_(x)
    return x * model.weight


def drawn(x: Tensor, draws: int) -> Tensor:
    for _ in range(draws):
        torch.rand(1)
    return x + 1


def leaking_grad_mode(x: Tensor) -> Tensor:
    y = x + 1
    torch.set_grad_enabled(False)
    return y


def leaking_autocast(x: Tensor) -> Tensor:
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    return x + 1


def leaking_cache_flag(x: Tensor) -> Tensor:
    torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
    return x + 1


def failing(*, leak: bool) -> Tensor:
    if leak:
        torch.set_grad_enabled(not torch.is_grad_enabled())
    raise ValueError("no")


def with_fourth_bit(x: Tensor) -> Tensor:
    return torch.nextafter(x * 2, torch.full_like(x, torch.inf))


def with_hidden_gradient(x: Tensor) -> Tensor:
    return x * 2 + (x - x.detach())


def writing_input(x: Tensor) -> Tensor:
    y = x * 2
    x.zero_()
    return y


def with_second_call(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x * model.calls


CASES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], Callable[[], Tensor]]] = {
    "one bit of a value": ("value", lambda m, x: x * 2, lambda m, x: with_fourth_bit(x), vector),
    "the sign of zero": ("value", lambda m, x: x * 0.0, lambda m, x: (x * 0.0).abs(), vector),
    "a NaN and a number": ("value", lambda m, x: x.log(), lambda m, x: x.log().nan_to_num(), vector),
    "dtype": ("dtype", lambda m, x: x + 1, lambda m, x: x.double() + 1, vector),
    "shape": ("shape", lambda m, x: x + 1, lambda m, x: (x + 1)[None], vector),
    "stride": ("stride", lambda m, x: torch.ones(2, 3), lambda m, x: torch.ones(3, 2).t(), vector),
    "layout": ("layout", lambda m, x: torch.eye(2), lambda m, x: torch.eye(2).to_sparse(), vector),
    "device": ("device", lambda m, x: torch.ones(2), lambda m, x: torch.ones(2, device="meta"), vector),
    "type of a tensor": ("type", lambda m, x: x + 1, lambda m, x: nn.Parameter(x + 1, requires_grad=False), vector),
    "requires_grad": ("requires_grad", lambda m, x: x + 1, lambda m, x: (x + 1).requires_grad_(), vector),
    "gradient": ("gradient", lambda m, x: x * 2, lambda m, x: with_hidden_gradient(x), leaf),
    "a buffer written twice": ("value", lambda m, x: counted(m, x), lambda m, x: counted(m, x, 2), vector),
    "an input written": ("value", lambda m, x: x * 2, lambda m, x: writing_input(x), vector),
    "an input given back": ("aliasing", lambda m, x: x, lambda m, x: x.clone(), vector),
    "outputs that share memory": (
        "aliasing",
        lambda m, x: [x + 1, x + 1],
        lambda m, x: [(y := x + 1), y],
        vector,
    ),
    "a parameter given back": ("aliasing", lambda m, x: m.count, lambda m, x: m.count.clone(), vector),
    "another part of the memory": (
        "aliasing",
        lambda m, x: x.zero_()[0],
        lambda m, x: x.zero_()[1],
        vector,
    ),
    "random draws": ("random state", lambda m, x: drawn(x, 1), lambda m, x: drawn(x, 2), vector),
    "grad mode left off": ("mode", lambda m, x: x + 1, lambda m, x: leaking_grad_mode(x), vector),
    "autocast left on": ("mode", lambda m, x: x + 1, lambda m, x: leaking_autocast(x), vector),
    "the autocast cache flag": ("mode", lambda m, x: x + 1, lambda m, x: leaking_cache_flag(x), vector),
    "a mode left by an exception": ("mode", lambda m, x: failing(leak=False), lambda m, x: failing(leak=True), vector),
    "an exception": ("exception", lambda m, x: x + 1, lambda m, x: failing(leak=False), vector),
    "the type of an exception": ("exception", lambda m, x: x + m.nothing, lambda m, x: failing(leak=False), vector),
    "list or tuple": ("structure", lambda m, x: (x + 1, None), lambda m, x: [x + 1, None], vector),
    "named tuple or tuple": ("structure", lambda m, x: Pair(x + 1, 2), lambda m, x: (x + 1, 2), vector),
    "keys": ("structure", lambda m, x: {"a": 1}, lambda m, x: {"b": 1}, vector),
    "a number": ("value", lambda m, x: (1, "a"), lambda m, x: (2, "a"), vector),
    "a string in a dataclass": ("value", lambda m, x: Result(x + 1, "a"), lambda m, x: Result(x + 1, "b"), vector),
    "type of a number": ("type", lambda m, x: 1, lambda m, x: True, vector),
}


@pytest.mark.parametrize("case", CASES)
def test_one_difference_is_reported_by_its_kind(case: str) -> None:
    kind, before, after, make = CASES[case]
    assert kinds(before, after, make()) == {kind}


@pytest.mark.parametrize("case", CASES)
def test_a_program_equals_itself(case: str) -> None:
    _, before, after, make = CASES[case]
    for forward in (before, after):
        assert compare(*pair(forward, forward), (make(),)).equal


def test_a_lost_gradient_is_found() -> None:
    comparison = compare(*pair(lambda m, x: m.weight * x, lambda m, x: m.weight.detach() * x), (leaf(),))
    assert Difference("gradient", "'weight'", "a gradient != none", "first call") in comparison.differences


def test_an_inference_tensor_is_distinguished_from_an_ordinary_one() -> None:
    def inferred(_: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x + 1

    assert kinds(lambda m, x: x + 1, inferred, vector()) == {"inference"}


def test_a_call_under_no_grad_is_made() -> None:
    def frozen(_: Any, x: Tensor) -> Tensor:
        return x + 1 if torch.is_grad_enabled() else x + 2

    comparison = compare(*pair(lambda m, x: x + 1, frozen), (vector(),))
    assert [difference.when for difference in comparison.differences] == ["under no_grad"]


def test_a_second_call_sees_the_state_that_the_first_left() -> None:
    comparison = compare(*pair(lambda m, x: x * 1, with_second_call), (vector(),))
    assert [difference.when for difference in comparison.differences] == ["second call, other data"]


def test_a_second_call_has_other_data() -> None:
    seen = vector()
    comparison = compare(*pair(lambda m, x: x + 0, lambda m, x: seen.clone()), (vector(),))
    assert [difference.when for difference in comparison.differences] == ["second call, other data"]


def test_whole_numbers_stay_valid_indices_in_the_second_call() -> None:
    table = nn.Embedding(5, 2)
    comparison = verify(table, table, (torch.tensor([[4, 0, 1]]),))
    assert comparison.notes == ()


def test_a_number_within_the_tolerance_is_equal() -> None:
    one, other = pair(lambda m, x: x * m.weight, lambda m, x: x * m.weight * 1.0001)
    assert not compare(one, other, (leaf(),)).equal
    assert verify(one, other, (leaf(),), tolerance=Tolerance(relative=1e-3)).equal


def test_a_tolerance_is_no_less_than_nothing() -> None:
    with pytest.raises(OptionError, match="not negative"):
        Tolerance(relative=-1)


def test_an_error_says_what_differs_where_and_by_how_much() -> None:
    def shifted(_: Any, x: Tensor) -> dict[str, Tensor]:
        y = x + 1
        y[1] += 0.25
        return {"loss": y}

    with pytest.raises(VerificationError) as caught:
        verify(*pair(lambda m, x: {"loss": x + 1}, shifted), (vector(),), second_call=False, no_grad_call=False)
    assert str(caught.value).splitlines() == [
        "the programs do not mean the same: 1 difference in 1 call",
        "  value of output['loss'] (first call): max |difference| 0.25 at (1,): -1.0 != -0.75 (1 of 3 elements differ)",
    ]


def test_gradients_can_be_excluded() -> None:
    assert kinds(lambda m, x: x * 2, lambda m, x: with_hidden_gradient(x), leaf(), gradients=False) == set()


def test_a_write_that_carries_gradients_is_followed() -> None:
    def cached(model: Any, x: Tensor, *, cut: bool) -> Tensor:
        model.count.copy_((model.weight.detach() if cut else model.weight) * x)
        return x + 1

    found = kinds(lambda m, x: cached(m, x, cut=False), lambda m, x: cached(m, x, cut=True), vector())
    assert found == {"requires_grad", "gradient"}


def test_state_mutated_before_an_exception_is_compared() -> None:
    def refused(model: Any, x: Tensor, *, written: bool) -> Tensor:
        if written:
            model.count.add_(1)
        raise ValueError("no")

    found = kinds(lambda m, x: refused(m, x, written=False), lambda m, x: refused(m, x, written=True), vector())
    assert found == {"value"}


def test_a_copy_of_the_model_is_paired_by_name_and_noted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    comparison = verify(model, copy.deepcopy(model), (torch.randn(4, 3),))
    assert "copies, paired by name" in comparison.notes[0]


def test_state_under_other_names_is_reported_under_the_names_of_the_original() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = nn.ModuleDict({"a": model[0], "b": model[1]})

        def forward(self, x: Tensor) -> Tensor:
            norm = self.stage["b"]
            norm(self.stage["a"](x))
            return norm(self.stage["a"](x))

    places = {difference.where for difference in compare(model, Renamed(), (torch.randn(4, 3),)).differences}
    assert places == {"buffer '1.running_mean'", "buffer '1.running_var'", "buffer '1.num_batches_tracked'"}


def test_what_differs_in_every_call_is_reported_once() -> None:
    comparison = compare(*pair(lambda m, x: x + 1, lambda m, x: x + 2), (vector(),))
    assert len(comparison.differences) == 1
    assert comparison.calls == 3


def test_an_original_that_raises_leaves_a_note() -> None:
    both = pair(lambda m, x: failing(leak=False), lambda m, x: failing(leak=False))
    comparison = compare(*both, (vector(),))
    assert comparison.notes[0] == "first call: the original raises ValueError: no, so less could be compared"
    assert (comparison.equal, comparison.raised) == (True, comparison.calls)
    with pytest.raises(VerificationError, match="nothing could be compared, give arguments that the original accepts"):
        verify(*both, (vector(),))


def test_arguments_that_are_no_tuple_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"`args` is a tuple of arguments, not a Tensor; for a single one write \(x,\)"
    ):
        verify(*pair(lambda m, x: x, lambda m, x: x), vector())  # type: ignore[arg-type]


def test_an_empty_comparison_reads_well() -> None:
    assert str(Comparison((), calls=2)) == "nothing differs in 2 calls"


def test_gradients_are_compared_whatever_the_default_device() -> None:
    models = pair(lambda m, x: x.sin(), lambda m, x: x.detach().sin() + 0 * x)
    x = vector().requires_grad_()
    with torch.device("meta"):
        found = compare(*models, (x,))
    assert {(one.kind, one.where) for one in found.differences} == {("gradient", "input[0]")}
    assert found.notes == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_on_the_device_are_counted() -> None:
    def drawn_on_device(_: Any, x: Tensor) -> Tensor:
        torch.rand(1, device="cuda")
        return x + 1

    models = pair(lambda m, x: x + 1, drawn_on_device)
    state = torch.cuda.get_rng_state()
    places = {found.where for found in compare(*models, (vector(),)).differences}
    assert places == {"cuda:0 after the call", "cuda:0 after backward"}
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_the_device_equals_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).cuda()
    mean = model[1].running_mean.clone()
    assert verify(model, model, (torch.randn(4, 3, device="cuda", requires_grad=True),)).notes == ()
    assert torch.equal(model[1].running_mean, mean)


class Residue(nn.Module):
    """A gradient of 1000, and one of the size of its rounding; the values do not tell."""

    def __init__(self, residue: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.shift = nn.Parameter(torch.zeros(2))
        self.residue = residue

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * 1000 + self.shift * self.residue


def test_a_gradient_of_terms_that_cancel_is_measured_by_the_others() -> None:
    one, other = (symbolic_trace(Residue(residue)) for residue in (1e-9, 2e-9))
    assert not compare(one, other, (torch.ones(2),), tolerance=Tolerance()).equal
    rounding = Tolerance(rounding=torch.finfo(torch.float32).eps)
    assert compare(one, other, (torch.ones(2),), tolerance=rounding).equal
    assert not compare(one, symbolic_trace(Residue(1e-2)), (torch.ones(2),), tolerance=rounding).equal


class Overwritten(nn.Module):
    """A gradient that is zero with this sign, and a value of `shown`, which depends on nothing."""

    def __init__(self, sign: float, shown: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.sign, self.shown = sign, shown

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.sign).fill_(self.shown) * x


def test_the_sign_of_a_gradient_that_is_zero_is_rounding() -> None:
    one, other = (symbolic_trace(Overwritten(sign)) for sign in (1.0, -1.0))
    (found,) = compare(one, other, (torch.ones(2),), tolerance=Tolerance()).differences
    assert (found.kind, "0.0 != -0.0" in found.detail) == ("gradient", True)
    assert compare(one, other, (torch.ones(2),), tolerance=ROUNDING).equal


def test_rounding_forgives_no_other_difference_where_all_gradients_are_zero() -> None:
    one = symbolic_trace(Overwritten(1.0))
    (shown,) = compare(
        one, symbolic_trace(Overwritten(1.0, shown=-0.0)), (torch.ones(2),), tolerance=ROUNDING
    ).differences
    assert (shown.kind, "0.0 != -0.0" in shown.detail) == ("value", True)
    tiny = torch.finfo(torch.float32).smallest_normal
    other = symbolic_trace(Tiny(tiny))
    (found,) = compare(symbolic_trace(Tiny(0.0)), other, (torch.ones(2),), tolerance=ROUNDING).differences
    assert found.kind == "gradient"


class Tiny(nn.Module):
    """A gradient of this size, and a value that is zero."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.size * x


ROUNDING = Tolerance(rounding=torch.finfo(torch.float32).eps)


def test_a_compiled_program_whose_backward_ran_before_is_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    arguments = (torch.randn(2, 4),)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(*arguments).sum().backward()
    verify(model, compiled, arguments)


def test_a_comparison_is_shown_by_its_first_line() -> None:
    assert repr(compare(torch.sin, torch.sin, (torch.ones(2),))) == "Comparison(nothing differs in 3 calls)"
    assert repr(compare(torch.sin, torch.cos, (torch.ones(2),))).startswith("Comparison(1 difference in 3 calls: value")


class _Updating(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.calls.add_(1)
        elif self.how == "by assignment":
            self.calls = self.calls + 1
        elif self.how == "by a copy":
            self.calls = self.calls.clone()
        return x * 2


@pytest.mark.parametrize(("one", "other"), [("in place", "by assignment"), ("never", "by a copy")])
def test_state_that_only_one_program_replaces_differs(one: str, other: str) -> None:
    x = torch.randn(3)
    for before, after, which in ((one, other, "the other program"), (other, one, "the original")):
        found = compare(_Updating(before), _Updating(after), (x,))
        assert {(difference.kind, difference.where) for difference in found.differences} == {
            ("identity", "buffer 'calls'")
        }
        assert which in found.differences[0].detail
        assert compare(_Updating(before), _Updating(before), (x,)).equal


def test_a_tensor_that_torch_failed_to_resize_is_not_read() -> None:
    def resizes(model: Model, x: Tensor) -> Tensor:
        model.count.resize_(1 << 50)
        return x

    def resizes_input(model: Model, x: Tensor) -> Tensor:
        return x.resize_(1 << 50)

    compared = compare(*pair(resizes_input, resizes_input), (vector(),))
    assert not compared.differences
    assert any("input[0] were not compared: resizing it failed" in note for note in compared.notes)
    assert not compare(*pair(resizes, resizes), (vector(),)).differences


def test_a_tensor_that_only_one_program_fails_to_resize_differs() -> None:
    def raises(model: Model, x: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    one = compare(*pair(lambda model, x: x.resize_(1 << 50), raises), (vector(),))
    assert {"shape", "value"} <= {difference.kind for difference in one.differences}
