"""Workspaces: what a kernel allocates inside on a GPU counts while its operator runs, in eager and compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from partita.memory._torch.recorder import Recorder
from partita.memory._torch.workspaces import workspace_bytes

aten: Any = torch.ops.aten


def _images(*sizes: tuple[int, ...], device: str = "cuda") -> list[Tensor]:
    return [torch.empty(size, device=device, dtype=torch.bfloat16) for size in sizes]


@pytest.fixture
def fakes() -> FakeTensorMode:
    """Values of a GPU, which need none."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def test_a_convolution_copies_images_that_are_not_in_channels_last_order(fakes: FakeTensorMode) -> None:
    with fakes:
        image, filters, made = _images((2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 8, 8))
        both = 2 * (image.numel() + made.numel())
        assert workspace_bytes(aten.convolution.default, (image, filters), made) == both
        assert workspace_bytes(aten.convolution_backward.default, (made, image, filters), (None,)) == both
        last = image.to(memory_format=torch.channels_last)
        assert workspace_bytes(aten.convolution.default, (last, filters), made) == 0
        (product,) = _images((5, 3, 1, 1))
        assert workspace_bytes(aten.convolution.default, (image, product), made) == 0


def test_the_backward_of_attention_sums_in_float32(fakes: FakeTensorMode) -> None:
    with fakes:
        query, key = _images((2, 4, 16, 8), (2, 4, 8, 8))
        backward = aten._scaled_dot_product_flash_attention_backward.default
        assert workspace_bytes(backward, (), (query, key, None)) == 4 * query.numel()
        assert workspace_bytes(aten._scaled_dot_product_flash_attention.default, (), (query,)) == 0


def test_nothing_is_known_of_other_devices_and_operators(fakes: FakeTensorMode) -> None:
    with fakes:
        image, filters, made = _images((2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 8, 8), device="cpu")
        assert workspace_bytes(aten.convolution.default, (image, filters), made) == 0
        assert workspace_bytes(aten.mm.default, (image, filters), made) == 0


def test_a_workspace_is_allocated_while_its_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"aten.sin.default": 1_000_000}
    monkeypatch.setattr(
        "partita.memory._torch.recorder.workspace_bytes", lambda target, args, result: sizes.get(str(target), 0)
    )
    x, recorder = torch.ones(25), Recorder()
    with recorder:
        made = x.cos().sin().exp()
    record = recorder.record
    assert [ran.allocated for ran in record.ran] == [100, 1_000_200, 200]
    assert record.peak == 1_000_200
    assert record.allocated == made.untyped_storage().nbytes()
    assert [one.bytes for one in record.alive_at(1)] == [100, 100, 1_000_000]
    assert [one.operator for one in record.alive_at(1) if one.is_workspace] == ["workspace of aten.sin.default"]
    assert not any(one.is_workspace for one in record.alive_at(2))
