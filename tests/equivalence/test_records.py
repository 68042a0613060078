"""What sparse and quantized tensors store is compared, where their elements as a dense tensor would not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from partita.equivalence import Tolerance, compare

TWICE = torch.tensor([[0, 0]])
FIRST = torch.tensor([[0], [0]])


def sparse(indices: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, (4,) * len(indices))


def stored(x: Tensor, at: list[int]) -> Tensor:
    """A coalesced zero, stored at these places."""
    return sparse(torch.tensor([at]), x[: len(at)] * 0).coalesce()


def quantized(x: Tensor, scale: float, zero: int = 0) -> Tensor:
    return torch.quantize_per_tensor(x, scale, zero, torch.qint8)


def along(axis: int) -> Callable[[Tensor], Tensor]:
    scales, zeros = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int)
    return lambda x: torch.quantize_per_channel(x.expand(4, 4), scales, zeros, axis, torch.qint8)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], tuple[str, str]]] = {
    "coalesced": (
        lambda x: sparse(TWICE, x[:2]),
        lambda x: sparse(TWICE, x[:2]).coalesce(),
        ("coalesced", "output"),
    ),
    "duplicates": (
        lambda x: sparse(TWICE, torch.ones(2)),
        lambda x: sparse(torch.tensor([[0, 0, 0]]), torch.tensor([1.0, 0.5, 0.5])),
        ("shape", "output.indices()"),
    ),
    "explicit zeros": (lambda x: stored(x, [0, 1]), lambda x: stored(x, []), ("shape", "output.indices()")),
    "places of zeros": (lambda x: stored(x, [0]), lambda x: stored(x, [1]), ("value", "output.indices()")),
    "dense axes": (
        lambda x: x.expand(4, 4).to_sparse(1),
        lambda x: x.expand(4, 4).to_sparse(2),
        ("sparse_dim", "output"),
    ),
    "zeros of rows": (
        lambda x: sparse(FIRST, x[:1] * 0).to_sparse_csr(),
        lambda x: (x.expand(4, 4) * 0).to_sparse_csr(),
        ("value", "output.crow_indices()"),
    ),
    "zeros of columns": (
        lambda x: sparse(FIRST, x[:1] * 0).to_sparse_csc(),
        lambda x: (x.expand(4, 4) * 0).to_sparse_csc(),
        ("value", "output.ccol_indices()"),
    ),
    "blocks": (
        lambda x: torch.eye(4).to_sparse_bsr((1, 2)),
        lambda x: torch.eye(4).to_sparse_bsr((2, 1)),
        ("shape", "output.crow_indices()"),
    ),
    "scale": (lambda x: quantized(x * 0, 0.1), lambda x: quantized(x * 0, 0.2), ("value", "output.q_scale()")),
    "zero point": (
        lambda x: quantized(x * 0 + 1, 0.5, -2),
        lambda x: quantized(x * 0, 0.5, 0),
        ("value", "output.q_zero_point()"),
    ),
    "axis": (along(0), along(1), ("quantization", "output")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_tensor_stores_is_compared(case: str) -> None:
    one, other, expected = CASES[case]
    x = torch.full((4,), 0.5)
    found = compare(one, other, (x,), second_call=False).differences
    assert expected in {(difference.kind, difference.where) for difference in found}
    for forward in (one, other):
        assert compare(forward, forward, (x,)).equal


def test_how_a_sparse_gradient_is_stored_is_free() -> None:
    """Autograd sums duplicates of an index in one program and keeps them in the other."""
    table = nn.Embedding(4, 2, sparse=True)
    both = torch.tensor([1, 2])
    found = compare(lambda x: table(x) * 2, lambda x: table(x) + table(x), (both,), gradients=True)
    assert found.equal


def test_a_view_of_more_dimensions_than_torch_computes_with_is_compared() -> None:
    class Tiled(nn.Module):
        def __init__(self, change: float) -> None:
            super().__init__()
            self.change = change

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.change).tile([1] * 100)

    one, same, other = (symbolic_trace(Tiled(change)) for change in (0.0, 0.0, 1.0))
    assert compare(one, same, (torch.ones(2),)).equal
    assert not compare(one, other, (torch.ones(2),)).equal


def test_a_scale_within_the_tolerance_is_equal() -> None:
    x = torch.zeros(3)
    for tolerance, equal in ((Tolerance(), False), (Tolerance(relative=1e-3), True)):
        options: Any = {"tolerance": tolerance, "second_call": False}
        found = compare(lambda x: quantized(x, 0.1), lambda x: quantized(x, 0.10001), (x,), **options)
        assert found.equal is equal


def test_a_quantized_argument_that_is_copied_keeps_its_scale() -> None:
    def read(x: Tensor) -> Tensor:
        return x.dequantize() * x.q_scale()

    found = compare(read, read, (quantized(torch.rand(3), 0.1, 2),))
    assert (found.equal, found.raised) == (True, 0)
