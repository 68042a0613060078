"""Recomputation (activation checkpointing): the treatment, what it keeps, its operators, and how they run."""

from partita.hops._torch.hop_rules import register_with_dynamo
from partita.recompute.keep import (
    Keep,
    KeepAtMost,
    KeepEverything,
    KeepExpensive,
    KeepNodes,
    KeepNothing,
    KeepOperators,
)
from partita.recompute.operators import keep, tag_activation_checkpoint, wrap_activation_checkpoint
from partita.recompute.recompute import Recompute

__all__ = [
    "Keep",
    "KeepAtMost",
    "KeepEverything",
    "KeepExpensive",
    "KeepNodes",
    "KeepNothing",
    "KeepOperators",
    "Recompute",
    "keep",
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
]

register_with_dynamo((keep, tag_activation_checkpoint, wrap_activation_checkpoint))
