"""Steps that use the program's own modules, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from partita.testing.draft import Draft
from partita.testing.recipe import Picks
from partita.testing.state import ATTRIBUTES

__all__ = ["ATTRIBUTE_READS", "MODULES"]

_PURE = ("linear", "blocks.0.linear", "norm", "frozen_batch", "submod_0")


def layer(draft: Draft, picks: Picks) -> None:
    draft.module(_PURE[picks[1] % len(_PURE)], draft.matrix(picks[0]))


def inplace_layer(draft: Draft, picks: Picks) -> None:
    draft.module("relu", draft.writable(picks[0]))


def batch_norm(draft: Draft, picks: Picks) -> None:
    draft.module("batch", draft.matrix(picks[0]))


def dropout(draft: Draft, picks: Picks) -> None:
    draft.module("dropout", draft.matrix(picks[0]))


def meter(draft: Draft, picks: Picks) -> None:
    draft.module("meter", draft.tensor(picks[0]))


def nested(draft: Draft, picks: Picks) -> None:
    draft.module("nested", draft.matrix(picks[0]))


def embedding(draft: Draft, picks: Picks) -> None:
    """A layer that scales down the rows of its weight that it reads."""
    draft.module("embedding", draft.call(torch.argmax, draft.matrix(picks[0]), dim=picks[1] % 2))


def alike(draft: Draft, picks: Picks) -> None:
    """Two layers whose paths are the same once dots become underscores."""
    hidden = draft.module("blocks.0.linear", draft.matrix(picks[0]))
    draft.module("blocks_0_linear", draft.matrix(picks[1]) if picks[2] % 2 else hidden)


def attribute(draft: Draft, picks: Picks) -> None:
    paths = tuple(ATTRIBUTES)
    draft.attribute(paths[(picks[0] + picks[1]) % len(paths)])


def linear(draft: Draft, picks: Picks) -> None:
    """A functional layer whose weight is known by two names."""
    matrix = draft.matrix(picks[0])
    weight = draft.attribute(("weight", "tied.weight", "linear.weight")[picks[1] % 3])
    draft.call(functional.linear, matrix, weight, draft.attribute("bias") if picks[2] % 2 else None)


def scale(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    draft.call(torch.mul, matrix, draft.attribute(("encoder.scale", "cache_row")[picks[1] % 2]))


def shift(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    draft.call(torch.add, matrix, draft.attribute(("encoder.shift", "cache", "twin", "frozen")[picks[1] % 4]))


def statistics(draft: Draft, picks: Picks) -> None:
    """A read of a buffer that a module writes."""
    draft.call(torch.sub, draft.matrix(picks[0]), draft.attribute("batch.running_mean"))


MODULES: Mapping[str, Callable[[Draft, Picks], None]] = {
    "modules.layer": layer,
    "modules.inplace": inplace_layer,
    "modules.batch_norm": batch_norm,
    "modules.dropout": dropout,
    "modules.meter": meter,
    "modules.nested": nested,
    "modules.embedding": embedding,
    "modules.alike": alike,
}
ATTRIBUTE_READS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "attributes.read": attribute,
    "attributes.linear": linear,
    "attributes.scale": scale,
    "attributes.shift": shift,
    "attributes.statistics": statistics,
}
