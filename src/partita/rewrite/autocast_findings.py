"""What autocast turns a node into: the node itself, the node on casts of its arguments, or other operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from partita._torch.watching import Label, Performance, Step, labels_in

__all__ = ["AsItIs", "OnCasts", "Place", "Places", "Rehearsed", "TakenApart", "ways_to_cast"]


class Place(NamedTuple):
    """A place among the nodes that a node reads, and the item of what stands there, if that is a container."""

    number: int
    item: int | None


#: Where what has a label stands among the arguments.
Places: TypeAlias = Mapping[Label, Sequence[Place]]


@dataclass(frozen=True, slots=True)
class AsItIs:
    """Autocast changes nothing."""


@dataclass(frozen=True, slots=True)
class OnCasts:
    """The same node on other arguments: first these casts are made, then each place reads what has its label."""

    casts: tuple[Step, ...]
    by_place: Mapping[int, Label]
    places: Places


@dataclass(frozen=True, slots=True)
class TakenApart:
    """Other operators in place of the node."""

    performance: Performance
    places: Places


Rehearsed: TypeAlias = AsItIs | OnCasts | TakenApart


def ways_to_cast(seen: Performance, places: Places) -> Iterator[tuple[tuple[Step, ...], dict[int, Label]]]:
    """Casts to make, and places to put them in, that may come down to what was seen; the most likely first."""
    leading = tuple(takewhile(lambda step: step.cast is not None, seen.steps))
    kept = _kept_casts(seen)
    # The operator may begin with casts of its own.
    for count in range(len(leading), -1, -1):
        made = [step.cast for step in leading[:count] if step.cast is not None]
        for by_place in _by_place([*made, *kept], places):
            yield leading[:count], by_place


def _by_place(casts: Sequence[Label], places: Places) -> Iterator[dict[int, Label]]:
    of_source: dict[Label, list[Label]] = {}
    for label in casts:
        assert label.cast_of is not None
        of_source.setdefault(label.cast_of, []).append(label)
    for turned in (False, True) if any(len(casts) > 1 for casts in of_source.values()) else (False,):
        by_place: dict[int, Label] = {}
        for source, labels in of_source.items():
            numbers = [place.number for place in places.get(source, ()) if place.item is None]
            labels = labels * len(numbers) if len(labels) == 1 else labels
            if len(labels) != len(numbers) or not numbers:
                return
            # C++ evaluates arguments in any order it likes, and some compilers take the last one first.
            by_place.update(zip(numbers, reversed(labels) if turned else labels, strict=True))
        if by_place:
            yield by_place


def _kept_casts(seen: Performance) -> list[Label]:
    """The casts that autocast has kept from earlier calls."""
    made = {label for step in seen.steps for label in labels_in(step.result)}
    read = labels_in([*((step.args, dict(step.kwargs)) for step in seen.steps), seen.result])
    return list(dict.fromkeys(label for label in read if label.cast_of is not None and label not in made))
