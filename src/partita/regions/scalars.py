"""Where truth values and symbolic floats are computed: in the regions that read them.

torch cannot save a body that takes one (2.13). They are cheap and follow from symbolic integers, which can cross.
"""

from __future__ import annotations

from collections.abc import Mapping

from partita.graphs.program import Program
from partita.solvers.quotient import ALONE, NOWHERE

__all__ = ["Copies", "settle_scalars"]

#: For each scalar that several places read, the regions that compute it for themselves.
Copies = Mapping[int, frozenset[int]]


def settle_scalars(owner: list[int], program: Program) -> Copies:
    """Moves each symbolic scalar to the only place that reads it; of the others, the copies that regions need.

    No cycle can arise: a region only waits for more of what its values were computed from.
    """
    index = program.index
    read_in: dict[int, frozenset[int]] = {}
    copies: dict[int, frozenset[int]] = {}
    # The last one first, since what a scalar is computed from goes wherever it goes.
    for number in sorted(program.symbolic_scalars, reverse=True):
        readers = [index.number[user] for user in index.nodes[number].users] or [number]
        places = frozenset[int]().union(*(read_in.get(at, {max(owner[at], ALONE)}) for at in readers))
        read_in[number] = places
        if len(places) == 1:
            (owner[number],) = places
        else:
            owner[number] = ALONE if ALONE in places else NOWHERE
            copies[number] = places - {ALONE}
    return copies
