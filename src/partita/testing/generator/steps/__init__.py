"""All steps, what a generated program can do, by kind; the name of a kind is its family, a dot and its form."""

from partita.testing.generator.draft import Steps
from partita.testing.generator.recipe import Features
from partita.testing.generator.steps.compute import FUNCTIONS, ITEMS, KEYWORDS, METHODS, OVERLOADS, SIZES
from partita.testing.generator.steps.containers import CONTAINERS, LISTS
from partita.testing.generator.steps.effects import (
    ATTRIBUTE_READS,
    CHECKS,
    HIGHER_ORDER,
    HOOKS,
    MODULES,
    RANDOM,
    UNKNOWN,
)
from partita.testing.generator.steps.memory import CROSSING_WRITES, VIEWS, WRITES
from partita.testing.generator.steps.modes import AUTOCAST, GRAD, INFERENCE, NESTED_WORK, NESTS

#: The steps of all programs.
STEPS: Steps = {
    **FUNCTIONS,
    **OVERLOADS,
    **METHODS,
    **KEYWORDS,
    **VIEWS,
    **WRITES,
    **MODULES,
    **ATTRIBUTE_READS,
    **CONTAINERS,
    **LISTS,
    **SIZES,
    **ITEMS,
    **RANDOM,
    **GRAD,
    **AUTOCAST,
    **INFERENCE,
    **CHECKS,
    **UNKNOWN,
    **HIGHER_ORDER,
}

#: The steps that only nests of modes have, besides the others.
NEST_STEPS: Steps = {**NESTS, **NESTED_WORK}


#: The steps that cross regions; apart from the others, so that the seeds of their programs stay.
CROSSING_STEPS: Steps = {**HOOKS, **CROSSING_WRITES}


def crossing_kinds(features: Features) -> tuple[str, ...]:
    """The kinds of `CROSSING_STEPS` that `features` allow."""
    return tuple(kind for kind in CROSSING_STEPS if features.has(kind.partition(".")[0]))


def families_of(features: Features) -> tuple[str, ...]:
    """The families of steps that `features` allow."""
    families = dict.fromkeys(kind.partition(".")[0] for kind in STEPS)
    return tuple(family for family in families if features.has(family))


def kinds_in(families: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of steps in these families, some more than once."""
    return tuple(kind for kind in _WEIGHTED if kind.partition(".")[0] in families)


# Entering a mode always fits and exiting it seldom, so without weights all modes would stay on to the end.
_WEIGHTS = {"grad.on": 2, "autocast.exit": 6, "inference.exit": 12, "sizes.arithmetic": 2}
_WEIGHTED = tuple(kind for kind in STEPS for _ in range(_WEIGHTS.get(kind, 1)))
