"""Chapter: the transformer trains with its blocks recomputed in backward, and saves less; the losses are the same."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import partita
from partita.policies import ByModule
from partita.treatments import Recompute
from partita_cli.demo.splitting import WORDS, Decoder

TITLE = "The transformer, trained with its blocks recomputed"

_STEPS = 3
_NAMES = ("plain     ", "recomputed")


def show() -> bool:
    """Shows what the plan predicts, trains both ways, and measures saved memory; returns whether all of it agrees."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (4, 32))
    model, twin = _decoder(), _decoder()
    plan = partita.plan(partita.capture(twin, (ids,)), ByModule("blocks.*"), Recompute())
    recomputed = plan.apply().module()
    print(f"every block is a region, of which only the input is saved:\n\n{plan}\n")
    saved = _show_saved(plan, (model, recomputed), ids)
    same = _show_losses(_trained(model, ids), _trained(recomputed, ids)) and _same_state(model, twin)
    print(f"losses, parameters and the mutated buffer: {'same, bit for bit' if same else 'DIFFERENT'}")
    return saved and same


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().train()


def _show_saved(plan: partita.Plan, modules: tuple[nn.Module, nn.Module], ids: torch.Tensor) -> bool:
    total = plan.saved_memory().total
    assert total is not None
    predicted = total.plain_bytes or 0, total.treated_bytes or 0
    measured = [_saved_bytes(module, ids) for module in modules]
    print("bytes saved for backward")
    for name, expected, found in zip(_NAMES, predicted, measured, strict=True):
        print(f"  {name}  {expected:9,} predicted  {found:9,} measured")
    return all(abs(expected - found) <= found // 100 for expected, found in zip(predicted, measured, strict=True))


def _saved_bytes(module: nn.Module, ids: torch.Tensor) -> int:
    """What autograd saves in a forward pass, each storage once, without parameters and buffers."""
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = module(ids)
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    total = sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in owned)
    del logits  # Its autograd graph keeps what was saved alive, so that no address is reused.
    return total


def _trained(module: nn.Module, ids: torch.Tensor) -> list[float]:
    """The losses of a few steps on the next token; dropout is on, with the same random numbers in each run."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _show_losses(plain: list[float], recomputed: list[float]) -> bool:
    print(f"losses of {len(plain)} steps, with dropout")
    for name, losses in zip(_NAMES, (plain, recomputed), strict=True):
        print(f"  {name}  {'  '.join(f'{loss:.9f}' for loss in losses)}")
    return plain == recomputed


def _same_state(model: nn.Module, twin: nn.Module) -> bool:
    """Whether two models have the same parameters and buffers after training, bit for bit."""
    pairs = zip(model.state_dict().items(), twin.state_dict().items(), strict=True)
    return all(name == other and torch.equal(value, found) for (name, value), (other, found) in pairs)
