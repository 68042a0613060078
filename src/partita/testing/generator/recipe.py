"""Recipes, the small values from which programs are built, always the same from the same recipe; and their features."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import TypeAlias, final

from partita.errors import OptionError

#: Small numbers with which a step chooses its operands and its form; 0 is the newest operand and the simplest form.
Picks: TypeAlias = tuple[int, int, int, int]

LARGEST_PICK = 15
METADATA = ("none", "custom", "val", "example_value", "both")


def random_pick(source: Random) -> int:
    """A pick from a seeded random source."""
    return source.randint(0, LARGEST_PICK)


def random_picks(source: Random) -> Picks:
    """All picks of a step."""
    return random_pick(source), random_pick(source), random_pick(source), random_pick(source)


@final
@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the program: the kind of its value and how it is declared."""

    kind: str
    pick: int = 0


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One thing the program does, usually one or two nodes; a step that cannot run at its place is skipped."""

    kind: str
    picks: Picks = (0, 0, 0, 0)


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole program as data; `source`, if any, is a shorter expression that builds the same program."""

    inputs: tuple[Input, ...] = (Input("plain"),)
    steps: tuple[Step, ...] = ()
    output: Step = Step("single")
    pytree: bool = False
    training: bool = True
    restores_grad: bool = True
    metadata: str = "none"
    odd_names: int = 0
    max_nodes: int = 30
    source: str = ""

    def __str__(self) -> str:
        return self.source or f"build({self!r})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Features:
    """Which families may appear; plain functions of tensors always do."""

    overloads: bool = True
    methods: bool = True
    keywords: bool = True
    modules: bool = True
    attributes: bool = True
    containers: bool = True
    lists: bool = True
    sizes: bool = True
    items: bool = True
    views: bool = True
    mutations: bool = True
    random: bool = True
    grad: bool = True
    autocast: bool = True
    inference: bool = True
    checks: bool = True
    unknown: bool = True
    hooks: bool = True
    higher_order: bool = True
    inputs: bool = True
    outputs: bool = True
    pytree: bool = True
    metadata: bool = True
    names: bool = True

    @classmethod
    def only(cls, *names: str) -> Features:
        """The named families and no others."""
        known = [field.name for field in fields(cls)]
        strange = [name for name in names if name not in known]
        if strange:
            raise OptionError(f"no feature is called {', '.join(map(repr, strange))}; there are {', '.join(known)}")
        return cls(**{name: name in names for name in known})

    def has(self, family: str) -> bool:
        """Whether the family may appear."""
        return family == "functions" or bool(getattr(self, family))

    def __repr__(self) -> str:
        off = [field.name for field in fields(self) if not getattr(self, field.name)]
        return f"Features({', '.join(f'{name}=False' for name in off)})"


ALL = Features()
