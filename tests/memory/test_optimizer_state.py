"""The bytes of an optimizer's state, before its first step and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.processes import run_on_ranks
from torch import nn

from partita.errors import OptionError
from partita.memory.optimizer_state import optimizer_bytes

_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adam", {}),
    ("AdamW", {"amsgrad": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


def _stepped(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the state after a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


@pytest.mark.parametrize(("name", "options"), _OPTIMIZERS)
def test_the_state_is_known_before_the_first_step(name: str, options: dict[str, Any]) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(64, 64))], **options)
    before = optimizer_bytes(optimizer)
    assert before == pytest.approx(_stepped(optimizer), abs=16)  # It counts its steps, too.


def test_groups_have_options_of_their_own() -> None:
    one, other = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [other], "momentum": 0.9}], lr=0.1)
    assert optimizer_bytes(optimizer) == 4 * 64 == _stepped(optimizer)


def _sharded(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = fully_shard(nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer_bytes(optimizer) == 2 * 4 * 64 * 64 // 2
    _stepped(optimizer)
    assert optimizer_bytes(optimizer) == pytest.approx(2 * 4 * 64 * 64 // 2, abs=16)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
def test_of_sharded_parameters_a_rank_has_its_part_of_the_state(tmp_path: Path) -> None:
    run_on_ranks(_sharded, str(tmp_path))


def test_the_state_of_an_optimizer_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(OptionError, match="LBFGS is not known before its first step; pass it in bytes"):
        optimizer_bytes(torch.optim.LBFGS([nn.Parameter(torch.ones(4))]))
