"""Fitted steps under DDP and FSDP2, in two processes: the losses of one process, and each rank within its budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.processes import run_on_ranks
from tests.memory.models import RATES, CrossAttention
from torch import Tensor, nn

import partita
from partita.errors import OptionError
from partita.memory import communication_bytes, measured_peak, step_memory
from partita.torch_compile import backend
from partita.torch_compile.options import BackendOptions

_STEPS, _ROWS = 3, 64


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(_ROWS, 32, generator=generator), torch.randint(16, (_ROWS,), generator=generator)


def _model() -> CrossAttention:
    torch.manual_seed(0)
    return CrossAttention(depth=3)


def _losses(model: nn.Module, called: Callable[..., Tensor], batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = called(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _fitted(kind: str, rank: int) -> tuple[nn.Module, Any, int]:
    """A model that is fitted, and runs under data parallelism; and how many bytes it may take."""
    from torch.distributed.fsdp import fully_shard

    model, batch = _model(), _batch(0, rank)
    under: Any = "DDP" if "DDP" in kind else "FSDP2"
    communication = communication_bytes(model, under=under)
    step = step_memory(model, batch, rates=RATES, communication=communication)
    allowed = int(0.5 * (step.smallest_peak_bytes + step.plain_peak_bytes))
    if "eager" in kind:
        model = step.plan(allowed).module()
    if under == "FSDP2":
        fully_shard(model)
    parallel = nn.parallel.DistributedDataParallel(model) if under == "DDP" else model
    if "eager" in kind:
        return parallel, parallel, allowed
    plans: list[Any] = []
    options = {
        "peak": 0.9,
        "inner": "aot_eager",
        "rates": RATES,
        "communication": communication,
        "on_plan": plans.append,
    }
    compiled = torch.compile(parallel, backend=backend, options=options)
    parallel.plans = plans  # type: ignore[assignment]
    return parallel, compiled, allowed


def _process(rank: int, folder: str, kinds: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole = _model()
    halves = [[_batch(step, one) for one in range(2)] for step in range(_STEPS)]
    joined = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in halves]
    expected = _losses(whole, whole, joined)  # type: ignore[arg-type]
    try:
        for kind in kinds:
            torch.compiler.reset()
            model, called, allowed = _fitted(kind, rank)
            own = torch.tensor(_losses(model, called, [pair[rank] for pair in halves]))
            dist.all_reduce(own)
            torch.testing.assert_close(own / 2, torch.tensor(expected), rtol=1e-5, atol=1e-6)
            if "compiled" in kind:
                assert all(plan.peak_bytes <= plan.allowed_bytes for plan in model.plans)  # type: ignore[union-attr]
                assert model.plans, kind
            else:
                _check_bytes(kind, model, called, rank, allowed)
    finally:
        dist.destroy_process_group()


def _check_bytes(kind: str, model: nn.Module, called: Any, rank: int, allowed: int) -> None:
    model.zero_grad()
    batch = _batch(0, rank)
    parameters: list[Any] = list(model.parameters())
    local = [one.to_local() if hasattr(one, "to_local") else one for one in parameters]
    if isinstance(model, nn.parallel.DistributedDataParallel):
        buckets = sum(map(int, model._get_ddp_logging_data()["bucket_sizes"].split(", ")))
        assert buckets == communication_bytes(model, under="DDP"), kind
    # Buckets are counted from the first operator on that writes into them.
    peak = measured_peak(lambda: called(*batch).backward(), (*local, *batch))
    assert 0.7 * allowed < peak <= allowed, (kind, peak, allowed)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
def test_two_processes_have_the_losses_of_one_within_their_budgets(tmp_path: Path) -> None:
    kinds = ("eager DDP", "eager FSDP2", "compiled DDP", "compiled FSDP2")
    run_on_ranks(_process, str(tmp_path), kinds)


def test_communication_counts_as_allocated_throughout() -> None:
    model, batch = _model(), _batch(0, 0)
    without = step_memory(model, batch, rates=RATES)
    communication = communication_bytes(model, under="DDP")
    assert communication == sum(4 * one.numel() for one in model.parameters())
    step = step_memory(model, batch, rates=RATES, communication=communication)
    assert step.plain_peak_bytes == without.plain_peak_bytes + communication
    assert step.plan(1.0).timeline.resident_bytes == without.resident_bytes + communication
    assert partita.fit(model, batch, peak=0.8, rates=RATES, communication="20kB").memory_plan.extra_bytes == 20_000


def test_communication_of_shards_is_estimated() -> None:
    model = _model()
    whole = sum(4 * one.numel() for one in model.parameters())
    assert communication_bytes(model, under="FSDP2", ranks=4) == whole + whole // 2
    model.encoder.requires_grad_(requires_grad=False)
    frozen = 4 * (32 * 32 + 32)
    assert communication_bytes(model, under="DDP") == whole - frozen
    assert communication_bytes(model, under="FSDP2", ranks=1) == whole + 2 * whole - frozen
    assert communication_bytes(nn.ReLU(), under="FSDP2", ranks=2) == 0


@pytest.mark.parametrize("communication", [-1, "-1MB", True, 1.5, None, "much", "9" * 400 + "GB"])
def test_communication_is_a_number_of_bytes(communication: Any) -> None:
    with pytest.raises(OptionError):
        step_memory(_model(), _batch(0, 0), rates=RATES, communication=communication)
    with pytest.raises(OptionError):
        BackendOptions.read({"peak": 0.5, "communication": communication})


def test_what_is_not_known_of_communication_is_asked_for() -> None:
    with pytest.raises(OptionError, match="pass `ranks`"):
        communication_bytes(_model(), under="FSDP2")
    with pytest.raises(OptionError, match="from 1 on"):
        communication_bytes(_model(), under="FSDP2", ranks=0)
    with pytest.raises(OptionError, match="'DDP' and 'FSDP2'"):
        communication_bytes(_model(), under="ZeRO")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="for steps that fit a 'peak'"):
        BackendOptions.read({"communication": 5})
