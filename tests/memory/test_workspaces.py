"""Workspaces: what a kernel allocates inside on a GPU counts while its operator runs, in eager and compiled steps."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        assert workspace_bytes(backward, (), (query, key, None)) == 4 * query.numel() + 4 * 2 * 4 * 16
        assert workspace_bytes(aten._scaled_dot_product_flash_attention.default, (), (query,)) == 0


def test_sums_over_many_rows_leave_partial_sums(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    class H200(NamedTuple):
        multi_processor_count: int = 132
        max_threads_per_multi_processor: int = 2048

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200())
    with fakes:
        many, few, made, number = _images((64 * 577, 4096), (8, 4096), (4096,), ())
        sizes = [workspace_bytes(aten.sum.dim_IntList, (one, [0]), made) for one in (many, few)]
        # The H200 with torch 2.11 allocates these, and 512 bytes for semaphores.
        assert sizes == [138_412_032, 0]
        assert workspace_bytes(aten.sum.dim_IntList, (many, [1]), _images((64 * 577,))[0]) == 0
        assert workspace_bytes(aten.sum.dim_IntList, (few, [0, 1]), number) == 0


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
