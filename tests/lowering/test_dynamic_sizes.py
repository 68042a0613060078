"""Sizes that change: symbols where the trace had them, or where a size has been seen to change, and guards on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, lowered, plan_of
from torch import Tensor, nn
from torch.export import Dim

from partita import Program, capture, plan, verify
from partita.policies import ByLabel
from partita.treatments import Lower


def sizes_of(inputs: list[Any]) -> list[str]:
    """The sizes of fake tensors as text, with symbols by the order in which they come."""
    names: dict[str, str] = {}
    shown = []
    for value in inputs:
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        shown.append(
            " ".join(
                names.setdefault(str(size), "abcdef"[len(names)]) if isinstance(size, torch.SymInt) else str(size)
                for size in sizes
            )
        )
    return shown


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_size_that_changes_becomes_a_symbol() -> None:
    backend = Counting()
    module = lowered(double, Lower(backend))
    for size in (8, 9, 10, 33, 8, 2):
        x = torch.randn(size, 4)
        assert torch.equal(module(x), x * 2)
    assert list(map(sizes_of, backend.made)) == [["8 4"], ["a 4"]]


def test_sizes_that_happen_to_be_equal_are_different_symbols() -> None:
    backend = Counting()
    module = lowered(lambda x, y: (x * 2, y * 3), Lower(backend, dynamic=True))
    for one, other in ((8, 8), (8, 9), (5, 4)):
        x, y = torch.randn(one, other), torch.randn(other, one)
        assert torch.equal(module(x, y)[1], y * 3)
    assert list(map(sizes_of, backend.made)) == [["a b", "c d"]]


def test_zero_and_one_are_never_symbols() -> None:
    backend = Counting()
    module = lowered(double, Lower(backend, dynamic=True))
    for size in (5, 1, 0, 7, 1, 0):
        x = torch.randn(size, 4)
        assert torch.equal(module(x), x * 2)
    assert list(map(sizes_of, backend.made)) == [["a b"], ["1 a"], ["0 a"]]


def test_without_dynamic_every_size_is_compiled_for() -> None:
    backend = Counting()
    module = lowered(double, Lower(backend, dynamic=False))
    for size in (8, 9, 8, 10):
        module(torch.randn(size))
    assert list(map(sizes_of, backend.made)) == [["8"], ["9"], ["10"]]


def test_a_backend_that_takes_no_symbols_gets_none() -> None:
    backend = Counting(takes_symbols=False)
    module = lowered(double, Lower(backend, dynamic=True))
    for size in (8, 9):
        module(torch.randn(size))
    assert list(map(sizes_of, backend.made)) == [["8"], ["9"]]


def exported(model: nn.Module, args: tuple[Any, ...], dynamic: Any) -> Program:
    return capture(model, args, dynamic_shapes=dynamic)


class Joined(nn.Module):
    """Two inputs of one length, and a number that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = self.linear(x) + y
        return torch.cat([mixed, x.new_zeros(x.shape[0] * 2, 4)]) * x.shape[0]


def test_traced_symbols_are_symbols_from_the_first_call_on() -> None:
    backend = Counting()
    batch = Dim("batch", min=2, max=64)
    program = exported(Joined(), (torch.randn(3, 4), torch.randn(3, 4)), ({0: batch}, {0: batch}))
    decided = plan(program, ByLabel(lambda node: "all" if node.op == "call_function" else None), Lower(backend))
    verify(program, decided.apply(), (torch.randn(3, 4), torch.randn(3, 4)))
    module = decided.apply().module()
    with torch.no_grad():
        for size in (5, 6, 7):
            module(torch.randn(size, 4), torch.randn(size, 4))
    assert not decided.failures
    assert len(backend.made) == 2, "with gradients and without"
    shown = sizes_of(backend.made[0])
    assert sorted(shown) == sorted(["4 4", "4", "a 4", "a 4"] + (["a"] if "a" in shown else []))


def test_symbolic_numbers_may_be_inputs_and_outputs() -> None:
    backend = Counting()
    program = exported(Joined(), (torch.randn(3, 4), torch.randn(3, 4)), ({0: Dim.AUTO}, {0: Dim.AUTO}))
    nodes = [node for node in program.index.nodes if node.op == "call_function"]
    half = {node.name: ("first" if place < len(nodes) // 2 else "second") for place, node in enumerate(nodes)}
    decided = plan(program, ByLabel(lambda node: half.get(node.name)), Lower(backend, strict=True))
    verify(program, decided.apply(), (torch.randn(3, 4), torch.randn(3, 4)))
    module = decided.apply().module()
    for size in (6, 9):
        module(torch.randn(size, 4), torch.randn(size, 4))
    assert len(backend.made) == 4, "two regions, with gradients and without"


def test_an_integer_that_changes_becomes_a_symbol() -> None:
    backend = Counting()
    module = lowered(lambda x, k: x.reshape(k, -1) * k, Lower(backend))
    x = torch.randn(24)
    for k in (2, 3, 4, 6):
        assert torch.equal(module(x, k), x.reshape(k, -1) * k)
    assert len(backend.made) <= 3
    assert isinstance(backend.made[1][1], torch.SymInt)


def test_guards_of_a_compiler_are_checked_before_its_code_is_used() -> None:
    def halves(x: Tensor) -> Tensor:
        return x.reshape(2, -1) * 2 if x.shape[0] % 2 == 0 else x

    class Asking(Counting):
        """Makes code that is only right for even sizes up to 20."""

        def compile(self, body, inputs):
            size = inputs[0].shape[0]
            even, small = bool(size % 2 == 0), bool(size <= 20)
            self.made.append([even, small])
            return lambda x: (x * (2 if even else 3) + (0 if small else 1),)

    backend = Asking()
    module = lowered(lambda x: x * 2, Lower(backend, dynamic=True))
    for size in (8, 10, 9, 11, 22, 24, 21):
        expected = torch.ones(size) * (2 if size % 2 == 0 else 3) + (0 if size <= 20 else 1)
        assert torch.equal(module(torch.ones(size)), expected)
    assert backend.made == [[True, True], [False, True], [True, False], [False, False]]


def test_a_size_that_a_compiler_fixes_is_checked() -> None:
    class Asking(Counting):
        """Makes code for eight rows that is only right for these."""

        def compile(self, body, inputs):
            is_eight = bool(inputs[0].shape[0] == 8)
            self.made.append([is_eight])
            return lambda x: (x * (2 if is_eight else 3),)

    backend = Asking()
    module = lowered(lambda x: x * 2, Lower(backend, dynamic=True))
    for size in (8, 9, 8, 10):
        assert torch.equal(module(torch.ones(size)), torch.ones(size) * (2 if size == 8 else 3))
    assert backend.made == [[True], [False]]


def test_a_guard_that_has_no_value_for_a_call_does_not_hold() -> None:
    """The code for a half of some rows is guarded by remainders of a division by that half, which may be none."""
    backend = Counting()
    module = lowered(lambda x: x.split(x.shape[0] // 2)[0] * 2, Lower(backend))
    for rows, columns in ((6, 8), (2, 6), (6, 6), (0, 0), (0, 6), (4, 6)):
        x = torch.randn(rows, columns, requires_grad=True)
        assert torch.equal(module(x), x[: rows // 2] * 2)


def test_a_number_that_is_found_to_be_a_product_of_sizes_stays_dynamic() -> None:
    """A mixture of experts passes the number of its tokens from layer to layer, beside batch and length."""
    backend = Counting()
    module = lowered(lambda x, tokens: x.flatten(0, 1).view(tokens, 4) * 2, Lower(backend, dynamic=True))
    for rows, length in ((2, 16), (3, 8), (5, 21)):
        x = torch.randn(rows, length, 4)
        assert torch.equal(module(x, rows * length), x.flatten(0, 1) * 2)
    assert len(backend.made) == 1


def test_equal_sizes_that_are_needed_are_checked() -> None:
    backend = Counting()
    module = lowered(lambda x, y: x + y, Lower(backend, dynamic=True))
    module(torch.randn(5), torch.randn(5))
    assert module(torch.randn(7), torch.randn(7)).shape == (7,)
    assert module(torch.randn(7), torch.randn(1)).shape == (7,)
    with pytest.raises(RuntimeError, match="must match"):
        module(torch.randn(5), torch.randn(6))


@pytest.mark.parametrize(
    "make",
    [lambda n: torch.randn(n, 4).t(), lambda n: torch.randn(4, n), lambda n: torch.randn(4, 2 * n)[:, ::2]],
)
def test_strides_of_open_sizes_are_checked(make) -> None:
    module = lowered(lambda x: x.reshape(-1) + x.t().reshape(-1), Lower(Counting(), dynamic=True))
    for of in (make, lambda n: torch.randn(4, n), make):
        for size in (6, 9):
            x = of(size)
            assert torch.equal(module(x), x.reshape(-1) + x.t().reshape(-1))


def test_where_symbols_are_too_much_the_sizes_of_the_call_are_taken() -> None:
    class Plain(Counting):
        def compile(self, body, inputs):
            if any(isinstance(size, torch.SymInt) for size in inputs[0].shape):
                raise NotImplementedError("symbols")
            return super().compile(body, inputs)

    backend = Plain()
    decided = plan_of(double, Lower(backend, dynamic=True))
    module = decided.apply().module()
    for size in (4, 5, 4):
        assert torch.equal(module(torch.ones(size)), torch.full((size,), 2.0))
    assert list(map(sizes_of, backend.made)) == [["4"], ["5"]]
    assert not decided.failures


def test_state_of_modules_has_no_open_sizes() -> None:
    backend = Counting()
    for model in (nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))):
        with torch.no_grad():
            lowered(model, Lower(backend, dynamic=True))(torch.randn(5, 4))
    assert [sorted(sizes_of(inputs)) for inputs in backend.made] == [["3", "3 4", "a b"]] * 2


def test_gradients_are_right_for_every_size() -> None:
    backend = Counting()
    program = program_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    after = plan_of(program, Lower(backend)).apply()
    for size in (3, 5, 7):
        verify(program, after, (torch.randn(size, 4, requires_grad=True),))
    assert len(backend.made) == 4, "with gradients and without, a known size and an open one"
