"""The second call of a comparison has other data, where the original accepts them; else a note says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.equivalence import compare, verify
from partita.equivalence.other_data import fill_with_other_data, has_data, refused

SAME = "second call: input[{}] has the same data as the first, since"


def other(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    assert fill_with_other_data([copied]) == []
    return copied


OTHERS: dict[str, tuple[Tensor, object]] = {
    "zeros": (torch.zeros(3), [0.75, 0.625, 0.5]),
    "a constant": (torch.full((3,), 2.0), [1.5, 1.25, 1.0]),
    "a negative constant": (torch.full((2,), -1.0), [-0.75, -0.5]),
    "a number": (torch.tensor(2.0), 1.5),
    "probabilities": (torch.tensor([0.0, 1.0, 0.5]), [0.375, 0.0, 0.75]),
    "both signs": (torch.tensor([1.0, -2.0, 4.0]), [-3.0, -0.75, 1.5]),
    "an additive mask": (torch.tensor([0.0, -torch.inf]), [-torch.inf, 0.0]),
    "a mask by large numbers": (torch.tensor([1.0, -(2.0**127), 2.0]), [1.5, 0.75, -0.75 * 2.0**127]),
    "half": (torch.zeros(2, dtype=torch.float16), [0.75, 0.5]),
    "complex": (torch.tensor([1j, 2.0]), [1.5, 0.75j]),
    "rows": (torch.tensor([[0, 1, 2], [7, 8, 9]]), [[2, 0, 1], [9, 7, 8]]),
    "columns": (torch.tensor([[0, 7], [1, 8], [2, 9]]), [[2, 9], [0, 7], [1, 8]]),
    "repeated along the longest axis": (torch.tensor([[0, 0, 0], [1, 1, 1]]), [[1, 1, 1], [0, 0, 0]]),
    "sorted": (torch.tensor([0, 2, 3, 7]), [0, 4, 5, 7]),
    "groups": (torch.tensor([0, 0, 1, 1]), [0, 0, 0, 1]),
    "sorted by equal steps": (torch.tensor([0, 2, 4]), [0, 1, 4]),
    "ends of sequences": (torch.tensor([4, 8]), [3, 8]),
    "places": (torch.arange(3), [2, 0, 1]),
    "equal integers": (torch.full((3,), 5), [5, 5, 4]),
    "equal rows": (torch.ones(2, 3, dtype=torch.uint8), [[1, 1, 0], [1, 1, 0]]),
    "integers of zero": (torch.zeros(3, dtype=torch.int), [0, 0, 1]),
    "an integer": (torch.tensor(3), 2),
    "booleans": (torch.tensor([True, False, False]), [False, True, False]),
    "a mask of all": (torch.ones(2, 3, dtype=torch.bool), [[True, True, False], [True, True, False]]),
    "a boolean": (torch.tensor(True), False),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_data_are_of_the_same_kind(case: str) -> None:
    tensor, expected = OTHERS[case]
    found = other(tensor)
    assert found.tolist() == expected
    assert found.dtype == tensor.dtype


UNUSUAL: dict[str, Tensor] = {
    "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
    "expanded": torch.ones(3, 1).expand(3, 4),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 0], dtype=torch.uint16),
    "sparse": torch.eye(3).to_sparse(),
    "rows": torch.eye(3).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_tensors_get_other_data(case: str) -> None:
    seen: list[Any] = []

    def sees(x: Tensor) -> Tensor:
        part = x.values() if x.is_nested and x.layout is torch.jagged else x.unbind()[0] if x.is_nested else x
        plain = part.dequantize() if part.is_quantized else part
        seen.append((plain.to_dense() if plain.layout is not torch.strided else plain).float().tolist())
        return plain.clone()

    found = compare(sees, sees, (UNUSUAL[case],), gradients=False)
    assert (found.equal, found.raised, found.notes) == (True, 0, ())
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    "kept",
    [
        torch.tensor([0, 7]),
        torch.arange(3, dtype=torch.int32),
        torch.tensor([-1, -1]),
        torch.full((2,), torch.nan),
        torch.full((2,), torch.inf),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,)),
    ],
    ids=["ends", "offsets", "negative", "nan", "infinite", "uncoalesced"],
)
def test_an_argument_without_other_valid_data_is_noted(kept: Tensor) -> None:
    found = compare(lambda x, y: y * 2, lambda x, y: y * 2, (kept, torch.rand(3)))
    assert found.notes == (f"{SAME.format(0)} no other values are known to be valid",)


def test_an_empty_argument_needs_no_note() -> None:
    assert not has_data(torch.empty(0, 3))
    assert compare(lambda x: x * 2, lambda x: x * 2, (torch.empty(0, 3),)).notes == ()


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (torch.zeros(3), lambda x: x * 3),
        (torch.tensor(2.0), lambda x: x + 2),
        (torch.zeros(3, dtype=torch.long), lambda x: x * 3),
        (torch.ones(3, dtype=torch.long), lambda x: x * x + 1),
        (torch.arange(3), lambda x: x.sort().values * 2),
        (torch.ones(3, dtype=torch.bool), lambda x: x.any() * 2 * torch.ones(3, dtype=torch.long)),
    ],
)
def test_programs_that_agree_on_such_data_alone_differ(given: Tensor, wrong: Callable[[Tensor], Tensor]) -> None:
    found = compare(lambda x: x * 2, wrong, (given,)).differences
    assert {difference.when for difference in found} == {"second call, other data"}
    assert compare(lambda x: x * 2, lambda x: x * 2, (given,)).equal


def test_parts_of_one_memory_get_other_data_each() -> None:
    memory = torch.arange(1.0, 7.0)
    one, whole = memory[2:3], memory
    before = [one.clone(), whole.clone()]
    fill_with_other_data([one, whole])
    assert not torch.equal(one, before[0])
    assert not torch.equal(whole, before[1])


def test_views_of_one_memory_stay_views_and_both_change() -> None:
    seen: list[Any] = []

    def sees(x: Tensor, y: Tensor) -> Tensor:
        seen.append((x.data_ptr() + 8 == y.data_ptr(), x.tolist(), y.tolist()))
        return x + y

    memory = torch.arange(1.0, 5.0)
    assert compare(sees, sees, (memory[:2], memory[2:])).equal
    first, second = seen[:2]
    assert first[0]
    assert second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]


def test_gradients_flow_to_arguments_with_other_data() -> None:
    x = torch.zeros(3, requires_grad=True)
    found = compare(lambda x: x * x, lambda x: x * x.detach() * 2 - x.detach() * x.detach(), (x * 1,))
    assert found.equal
    wrong = compare(lambda x: x * x, lambda x: x * x.detach(), (x * 1,)).differences
    assert {(one.kind, one.when) for one in wrong} == {("gradient", "second call, other data")}


def test_an_argument_whose_other_data_the_original_refuses_keeps_its_data() -> None:
    table = nn.Embedding(1, 2)
    args = (torch.zeros(3, dtype=torch.long), torch.rand(3, 2))
    found = verify(lambda at, x: table(at) * x, lambda at, x: table(at) * x, args)
    (note,) = found.notes
    assert note.startswith(
        "second call: input[0] has the same data as the first, since with other data the original raises IndexError"
    )
    assert found.raised == 0
    # The other argument has other data.
    differs = compare(lambda at, x: table(at) * x, lambda at, x: table(at) * args[1], args).differences
    assert {difference.when for difference in differs} == {"second call, other data"}


def test_offsets_that_are_refused_keep_their_data() -> None:
    weight = torch.randn(8, 2)

    def bags(at: Tensor, offsets: Tensor) -> Tensor:
        return functional.embedding_bag(at, weight, offsets)

    for offsets in (torch.tensor([0, 2, 5]), torch.tensor([0, 4])):
        assert compare(bags, bags, (torch.arange(8), offsets)).raised == 0
    found = compare(bags, bags, (torch.arange(8), torch.arange(8)))
    assert (found.equal, found.raised, len(found.notes)) == (True, 0, 1)
    assert (
        "input[1] has the same data as the first, since with other data the original raises RuntimeError"
        in found.notes[0]
    )


def test_what_raises_for_the_state_that_the_first_call_left_is_no_argument() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            if self.calls > 1:
                raise ValueError("once")
            return x * 2

    found = compare(Once(), Once(), (torch.rand(3),))
    assert found.raised == 1
    assert not any("same data" in note for note in found.notes)


def test_memory_that_is_state_is_noted() -> None:
    model = nn.BatchNorm1d(3)
    found = compare(lambda x, mean: model(x) + mean, lambda x, mean: model(x) + mean, (torch.rand(4, 3), torch.ones(3)))
    assert found.notes == ()
    found = compare(model, model, (model.running_var.expand(4, 3),))
    assert found.notes == (f"{SAME.format(0)} its memory is state",)


@pytest.mark.parametrize("bad", [(), (3,), (0, 7), (2, 3, 4)])
def test_the_refused_are_found_by_halving(bad: tuple[int, ...]) -> None:
    tries = list[object]()

    def accepts(chosen: Any) -> bool:
        tries.append(chosen)
        return not set(bad) & set(chosen)

    assert refused(range(64), accepts) == list(bad)
    assert len(tries) <= 1 + 2 * 6 * max(len(bad), 1)
