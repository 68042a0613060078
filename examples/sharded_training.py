"""Trains a decoder with FSDP2 in two processes, each block sharded and recomputed in the backward.

python examples/sharded_training.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing
from model import Decoder, some_ids
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard

from partita.policies import ByModule
from partita.torch_compile import backend, plans
from partita.treatments import Recompute

PROCESSES, STEPS = 2, 3


def main() -> None:
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder,), nprocs=PROCESSES)
    print("each process has the same losses with and without recomputation")


def process(rank: int, folder: str) -> None:
    """One of the processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    try:
        plain = sharded_decoder()
        losses, saved = train(plain, plain, rank)

        # The hooks of FSDP break the graph around each block, so each is a frame of its own, which the policy finds by
        # its path in the model. "aot_eager" compiles nothing; use "inductor" to run fast.
        model = sharded_decoder()
        options = {"policy": ByModule("blocks.*"), "treatment": Recompute(), "inner": "aot_eager"}
        own_losses, own_saved = train(model, torch.compile(model, backend=backend, options=options), rank)
        assert losses == own_losses, (losses, own_losses)
        assert own_saved < saved
        if rank == 0:
            for frame in plans(model):
                if len(frame.plan.partition):
                    print(frame.path, *map(str, frame.plan.saved_memory().lines()), sep="\n  ")
            print("losses:", *(f"{loss:.4f}" for loss in losses))
            print(f"saved for backward: {saved:,} bytes without recomputation, {own_saved:,} with it")
    finally:
        dist.destroy_process_group()


def sharded_decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(layers=3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def train(model: nn.Module, called: nn.Module, rank: int) -> tuple[list[float], int]:
    """The losses of a few steps, and the bytes that autograd saves in the last forward."""
    optimizer, losses, saved = torch.optim.AdamW(model.parameters(), lr=0.01), [], 0
    torch.manual_seed(rank)
    ids = some_ids(rows=4)
    for _ in range(STEPS):
        storages: dict[int, int] = {}

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            if not isinstance(tensor, nn.Parameter):  # FSDP frees those that it has gathered.
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            logits = called(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        saved = sum(storages.values())
    return losses, saved


if __name__ == "__main__":
    main()
