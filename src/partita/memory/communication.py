"""What data parallelism allocates beside a training step: buckets of gradients, shards, gathered parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from partita.errors import OptionError


def communication_bytes(model: nn.Module, *, under: Literal["DDP", "FSDP2"], ranks: int | None = None) -> int:
    """The bytes on each rank that a step takes more under DDP or FSDP2, estimated from the sizes of parameters.

    DDP copies gradients into buckets. FSDP2 holds shards of parameters and gradients beside the whole ones that the
    step reads and makes, and the buffer that they are gathered or reduced in: as large as all parameters, or, if blocks
    are sharded by themselves, as the largest block, twice, since the next block is gathered meanwhile. `ranks` is the
    size of the process group, if there is none yet.
    """
    if under == "DDP":
        return _bytes(one for one in model.parameters() if one.requires_grad)
    if under != "FSDP2":
        raise OptionError(
            f"communication is known under 'DDP' and 'FSDP2', not under {under!r}; pass its bytes instead"
        )
    if ranks is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError("how many ranks share the parameters is not known without a process group; pass `ranks`")
        ranks = dist.get_world_size()
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise OptionError(f"parameters are shared by a number of ranks from 1 on, not by {ranks!r}")
    parameters = list(model.parameters())
    whole, trained = _bytes(parameters), _bytes(one for one in parameters if one.requires_grad)
    groups = _sharded_groups(model) or [list[Tensor](parameters)]
    largest = max((_bytes(group) for group in groups), default=0)
    return -(-(whole + trained) // ranks) + largest * min(len(groups), 2)


def is_wrapped_for_ddp(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def _bytes(parameters: Iterable[Tensor]) -> int:
    """The bytes of whole parameters, each once; a sharded one has the shape of the whole."""
    return sum(one.numel() * one.element_size() for one in dict.fromkeys(parameters))


def _sharded_groups(model: nn.Module) -> list[list[Tensor]]:
    """The parameters that FSDP2 gathers together, for each module that was sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # If it was never imported, nothing is sharded.
    sharded = [one for one in model.modules() if fsdp is not None and isinstance(one, fsdp.FSDPModule)]
    inner = {one: [other for other in one.modules() if other is not one and other in set(sharded)] for one in sharded}
    groups = []
    for one in sharded:
        taken = {id(parameter) for other in inner[one] for parameter in other.parameters()}
        own: list[Tensor] = [parameter for parameter in one.parameters() if id(parameter) not in taken]
        groups += [own] if own else []
    return groups
