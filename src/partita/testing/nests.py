"""Nests: the steps of programs in which many modes lie in one another, down and up again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

from partita.testing.features import Features
from partita.testing.recipe import Step, drawn_picks
from partita.testing.steps.table import families_of, kinds_in

__all__ = ["NEST_KINDS", "nest_steps"]

_DEEPEST = 8
_OWN_WORK = ("nests.weight", "nests.only", "nests.border", "nests.body", "nests.toggle", "nests.empty")
_LEAVES = (*["nests.leave"] * 9, *["nests.cross"] * 3, "nests.forget")

#: What hypothesis draws the steps of a nest from; as many leave a block as enter one.
NEST_KINDS = (
    *("nests.grad", "nests.asked", "nests.autocast", "nests.autocast", "nests.inference", "nests.again"),
    *("nests.leave", "nests.leave", "nests.leave", "nests.cross", "nests.cross", "nests.forget"),
    *_OWN_WORK,
)


def nest_steps(source: Random, features: Features, *, length: int) -> tuple[Step, ...]:
    """Blocks in blocks, up to eight, with work at every depth.

    Some programs put back the grad mode by constants, as traced ones do, some ask for it first, and some do both; about
    half of them have no inference block, since torch has no operator for those.
    """
    grad = source.choice((("nests.grad",), ("nests.asked",), ("nests.grad", "nests.asked")))
    infers = features.inference and source.random() < 0.5
    blocks = (*grad * 4, *["nests.autocast"] * 5, "nests.again", *["nests.inference"] * (2 if infers else 0))
    work = (*_OWN_WORK * 4, *_other_kinds(source, features, infers=infers))
    kinds = islice(_kinds(source, blocks, work), source.randint(4, length))
    return tuple(Step(kind, drawn_picks(source)) for kind in kinds)


def _kinds(source: Random, blocks: tuple[str, ...], work: tuple[str, ...]) -> Iterator[str]:
    """Strokes down into blocks and up out of them, without an end."""
    depth = 0
    while True:
        for _ in range(source.randint(1, _DEEPEST - depth) if depth < _DEEPEST else 0):
            yield source.choice(blocks)
            yield from (source.choice(work) for _ in range(source.choice((0, 1, 1, 2))))
            depth += 1
        for _ in range(source.randint(1, depth)):
            yield source.choice(_LEAVES)
            yield from (source.choice(work) for _ in range(source.choice((0, 0, 1))))
            depth -= 1


def _other_kinds(source: Random, features: Features, *, infers: bool) -> tuple[str, ...]:
    families = (family for family in families_of(features) if infers or family != "inference")
    kinds = kinds_in((*(family for family in families if source.random() < 0.4), "functions"))
    # A module that leaves gradients on whatever they were means something else under callers without gradients.
    return tuple(kind for kind in kinds if kind != "grad.left_on")
