"""Recipes: the small drawn values from which a program is built, always the same program from the same recipe."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias, final

__all__ = ["LARGEST_PICK", "METADATA", "Input", "Picks", "Recipe", "Step", "drawn_pick", "drawn_picks"]

#: Small numbers with which a step chooses its operands and its form; 0 is the newest operand and the simplest form.
Picks: TypeAlias = tuple[int, int, int, int]

LARGEST_PICK = 15
METADATA = ("none", "custom", "val", "example_value", "both")


def drawn_pick(source: Random) -> int:
    """A pick from a numbered random source."""
    return source.randint(0, LARGEST_PICK)


def drawn_picks(source: Random) -> Picks:
    """All picks of a step."""
    return drawn_pick(source), drawn_pick(source), drawn_pick(source), drawn_pick(source)


@final
@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the program: what kind of value it is and how it is declared."""

    kind: str
    pick: int = 0


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One thing the program does, usually one or two nodes; a step that cannot run where it stands is left out."""

    kind: str
    picks: Picks = (0, 0, 0, 0)


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole program as data; `source`, where given, is the shorter text that makes the same program."""

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
