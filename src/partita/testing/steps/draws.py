"""Steps that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from partita.testing.draft import Draft
from partita.testing.recipe import Picks

__all__ = ["DRAWS"]

aten = torch.ops.aten


def noise(draft: Draft, picks: Picks) -> None:
    match picks[1] % 4:
        case 0:
            draft.call(torch.rand_like, draft.tensor(picks[0]))
        case 1:
            draft.call(torch.randn, 4, 6)
        case 2:
            draft.call(aten.rand_like.default, draft.tensor(picks[0]))
        case _:
            draft.call(torch.bernoulli, draft.call(torch.sigmoid, draft.tensor(picks[0])))


def dropout(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    match picks[1] % 3:
        case 0:
            draft.call(functional.dropout, tensor, 0.5, training=True)
        case 1:
            draft.call(torch.dropout, tensor, 0.25, True)
        case _:
            draft.call(aten.dropout.default, tensor, 0.25, True)


def inplace(draft: Draft, picks: Picks) -> None:
    draft.method(("bernoulli_", "uniform_", "normal_")[picks[1] % 3], draft.writable(picks[0]))


def own_generator(draft: Draft, picks: Picks) -> None:
    """Noise from a generator that the program owns."""
    source = draft.attribute("generator")
    if picks[0] % 2:
        draft.method("uniform_", draft.writable(picks[1]), generator=source)
    else:
        draft.call(torch.rand, 4, 6, generator=source)


def shuffled(draft: Draft, picks: Picks) -> None:
    order = draft.call(torch.randperm, 4)
    draft.call(torch.index_select, draft.matrix(picks[0]), 0, order)


DRAWS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "random.noise": noise,
    "random.dropout": dropout,
    "random.inplace": inplace,
    "random.shuffled": shuffled,
    "random.own_generator": own_generator,
}
