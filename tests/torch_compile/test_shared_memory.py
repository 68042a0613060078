"""Inputs that share memory in another way than when their graph was compiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.memory import Rates
from partita.policies import BySize
from partita.torch_compile import backend
from partita.torch_compile.shared_memory import overlaps_of
from partita.treatments import Call, Lower, Recompute

RATES = Rates(matmul_flops=1e11, attention_flops=1e11, bytes=1e10, call=5e-6)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "pieces": {"policy": BySize(parts=2), "treatment": Call()},
    "recomputed": {"policy": BySize(parts=2), "treatment": Recompute()},
    "lowered": {"policy": BySize(parts=2), "treatment": Lower("aot_eager")},
    "peak": {"peak": "1MB", "rates": RATES},
}


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


def _update(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    before = x * 2
    state.add_(1)
    return before + state, x * 3


def _apart() -> tuple[Tensor, Tensor]:
    return torch.arange(6.0), torch.ones(6)


def _view() -> tuple[Tensor, Tensor]:
    x = torch.arange(6.0)
    return x, x[:]


def _shifted(by: int) -> tuple[Tensor, Tensor]:
    memory = torch.arange(12.0)
    return memory[:6], memory[by : by + 6]


def _same() -> tuple[Tensor, Tensor]:
    x = torch.arange(6.0)
    return x, x


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_call_computes_what_its_own_inputs_share(way: str, dynamic: bool | None) -> None:
    compiled = torch.compile(_update, backend=backend, dynamic=dynamic, options={"inner": "aot_eager", **WAYS[way]})
    calls = (_apart(), _view(), _shifted(2), _shifted(3), _shifted(6), _same(), _apart(), _view())
    for args, expected_args in zip(calls, map(_copied, calls), strict=True):
        expected = _update(*expected_args)
        torch.testing.assert_close(compiled(*args), expected, rtol=0, atol=0)
        torch.testing.assert_close(args, expected_args, rtol=0, atol=0)


def _copied(args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same values in other memory, shared in the same way."""
    first, second = args
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return first.clone(), second.clone()
    storage = first.untyped_storage().clone()
    return tuple(torch.empty(0).set_(storage, one.storage_offset(), one.shape, one.stride()) for one in args)  # type: ignore[return-value]


def test_a_graph_compiled_for_overlapping_inputs_takes_others() -> None:
    compiled = torch.compile(_update, backend=backend, options={"inner": "aot_eager"})
    for args in (_shifted(2), _apart(), _shifted(3)):
        expected = _update(*_copied(args))
        torch.testing.assert_close(compiled(*args), expected, rtol=0, atol=0)


def test_gradients_are_those_of_the_shared_memory() -> None:
    def scaled(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        state.add_(1)
        return x * weight

    compiled = torch.compile(scaled, backend=backend, options={"inner": "aot_eager"})
    for args in (_apart(), _view()):
        found, expected = (torch.ones(6, requires_grad=True) for _ in range(2))
        expected_args = _copied(args)
        compiled(*args, found).sum().backward()
        scaled(*expected_args, expected).sum().backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


def test_a_warning_says_once_that_the_graph_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(_update, backend=backend, options={"inner": "aot_eager"})
    with caplog.at_level(logging.WARNING, "partita.torch_compile"):
        compiled(*_apart())
        assert not caplog.messages
        compiled(*_view())
        compiled(*_view())
    assert [message for message in caplog.messages if "share memory" in message] == caplog.messages[:1]


def test_graphs_that_mutate_no_input_are_not_checked() -> None:
    ran: list[int] = []

    def counted(gm: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(len(args))
            return gm.forward(*args)

        return run

    compiled = torch.compile(lambda x, y: x * y, backend=backend, options={"inner": counted})
    for args in (_apart(), _view()):
        compiled(*args)
    assert ran == [2, 2]


@pytest.mark.parametrize(
    ("extents", "overlapping"),
    [
        ([(0, 4), (4, 4)], []),
        ([(0, 5), (4, 4)], [0, 1]),
        ([(0, 9), (1, 2), (4, 2), (9, 1)], [0, 1, 2]),
        ([(4, 0), (2, 6), (9, 1)], []),
    ],
)
def test_overlaps_are_of_bytes_in_one_storage(extents: list[tuple[int, int]], overlapping: list[int]) -> None:
    memory = torch.zeros(10)
    args = [memory[begin : begin + size] for begin, size in extents]
    found = tuple((place, extents[place][0]) for place in overlapping)
    assert overlaps_of(args, range(len(args))) == ((found,) if found else ())
    assert overlaps_of([arg.clone() for arg in args], range(len(args))) == ()


def test_two_memories_that_are_shared_are_not_one() -> None:
    def update(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(1)
        return x * 2, z * w

    def two() -> tuple[Tensor, ...]:
        one, other = torch.arange(6.0), torch.ones(6)
        return one[:], one[:], other[:], other[:]

    def one() -> tuple[Tensor, ...]:
        memory = torch.arange(6.0)
        return memory[:], memory[:], memory[:], memory[:]

    for calls in ((two, one), (one, two)):
        torch.compiler.reset()
        compiled = torch.compile(update, backend=backend, options={"inner": "aot_eager"})
        for args in calls:
            torch.testing.assert_close(compiled(*args()), update(*args()), rtol=0, atol=0)
