"""Parts of a part: some of its units, cut so that they can run one after another where the part ran.

No path leaves a part of a legal partition and comes back to it. So only what is inside matters, and what can run in the
place of the part is legal in the whole, whatever becomes of the other parts. Everything here is linear in the part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from partita.solvers.components import components
from partita.solvers.grown_parts import grown_parts
from partita.solvers.relation import Relation, relation

__all__ = ["connected_parts", "cut_in_order", "deep_order", "kept_parts"]


def kept_parts(between: Relation, units: Sequence[int], kept: Collection[int]) -> list[list[int]]:
    """The fewest parts of `kept` if the other `units` of a part, all in an order that can run, run by themselves."""
    levels: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for unit in units:
        is_kept = unit in kept
        level = 1 if is_kept else 0
        for source in between.behind[unit]:
            reached = levels.get(source, -1)
            if reached >= level:
                level = reached + 1 if is_kept and source not in kept else reached
        levels[unit] = level
        if is_kept:
            parts.setdefault(level, []).append(unit)
    return [parts[level] for level in sorted(parts)]


def connected_parts(between: Relation, units: Sequence[int]) -> list[list[int]]:
    """The units of a part in parts that data connects, by their first units."""
    pieces = _linked(between, units)
    if len(pieces) == 1:
        return pieces
    piece_of = {unit: at for at, piece in enumerate(pieces) for unit in piece}
    found: list[list[int]] = []
    for knot in components(range(len(pieces)), _edges_of_pieces(between, units, piece_of)):
        if len(knot) == 1:
            found.append(pieces[knot[0]])
        else:  # Effects lead from one piece to another and back.
            members = frozenset(unit for at in knot for unit in pieces[at])
            found += _grown(between, [unit for unit in units if unit in members])
    place = {unit: at for at, unit in enumerate(units)}
    return sorted(found, key=lambda part: place[part[0]])


def deep_order(between: Relation, units: Sequence[int]) -> list[int]:
    """The units of a part in an order that can run, each shortly after what it reads, so that runs are connected."""
    inside, seen, order = frozenset(units), set[int](), list[int]()
    for last in reversed(units):
        path = [] if last in seen else [(last, _inside(between.behind[last], inside))]
        seen.add(last)
        while path:
            unit, rest = path[-1]
            for source in rest:
                if source not in seen:
                    seen.add(source)
                    path.append((source, _inside(between.behind[source], inside)))
                    break
            else:
                order.append(unit)
                path.pop()
    return order


def cut_in_order(units: Sequence[int], sizes: Mapping[int, int], largest: int) -> list[list[int]]:
    """The units, in an order that can run, in parts of at most the largest size; a unit alone may be larger."""
    parts: list[list[int]] = []
    held = largest
    for unit in units:
        if held + sizes[unit] > largest:
            parts.append([])
            held = 0
        parts[-1].append(unit)
        held += sizes[unit]
    return parts


def _linked(between: Relation, units: Sequence[int]) -> list[list[int]]:
    root = {unit: unit for unit in units}

    def find(unit: int) -> int:
        while root[unit] != unit:
            root[unit] = unit = root[root[unit]]
        return unit

    for unit in units:
        for source in _inside(between.reads[unit], root):
            root[find(source)] = find(unit)
    pieces: dict[int, list[int]] = {}
    for unit in units:
        pieces.setdefault(find(unit), []).append(unit)
    return list(pieces.values())


def _edges_of_pieces(between: Relation, units: Sequence[int], piece_of: Mapping[int, int]) -> dict[int, list[int]]:
    edges: dict[int, list[int]] = {}
    for unit in units:
        for source in _inside(between.behind[unit], piece_of):
            if piece_of[source] != piece_of[unit]:
                edges.setdefault(piece_of[source], []).append(piece_of[unit])
    return edges


def _grown(between: Relation, units: Sequence[int]) -> list[list[int]]:
    """Connected parts that grow along the data; single units where that would take too long."""
    place = {unit: at for at, unit in enumerate(units)}
    order = range(len(units))
    data = ((place[source], place[unit]) for unit in units for source in _inside(between.reads[unit], place))
    behind = ((place[source], place[unit]) for unit in units for source in _inside(between.behind[unit], place))
    part_of = grown_parts(relation(order, order, data=data, effects=behind), [0] * len(units)) or order
    parts: dict[int, list[int]] = {}
    for unit, part in zip(units, part_of, strict=True):
        parts.setdefault(part, []).append(unit)
    return list(parts.values())


def _inside(found: Sequence[int], inside: Collection[int]) -> Iterator[int]:
    return (unit for unit in found if unit in inside)
