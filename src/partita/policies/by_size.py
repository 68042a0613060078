"""BySize: the program in graph order, cut into regions of a given size."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import final

from partita.errors import OptionError
from partita.graphs.program import Program
from partita.policies.legal_partition import legal_partition
from partita.policies.parameter_bytes import first_use_bytes
from partita.policies.places import Piece, no_places, placeable
from partita.regions import Partition

__all__ = ["BySize"]


@final
@dataclass(frozen=True, slots=True)
class BySize:
    """Regions of at most so many operators or so many bytes of parameters, or so many regions of equal length.

    Give exactly one. A parameter counts where it is first used, a shared one there only. An operator that exceeds the
    limit by itself opens a region of its own. Items taken out of containers are not counted as operators.
    """

    _: KW_ONLY
    parameter_bytes: int | None = None
    operators: int | None = None
    parts: int | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise OptionError(
                f"BySize takes exactly one of parameter_bytes, operators and parts, not {len(given)}: {given}"
            )
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} is a whole number above zero, not {value!r}")

    def __call__(self, program: Program) -> Partition:
        operators = list(placeable(program))
        if self.parameter_bytes is not None:
            sizes = first_use_bytes(program)
            cut = _cut_by_bytes([sizes[number] for number in operators], self.parameter_bytes)
        elif self.operators is not None:
            cut = [at // self.operators for at in range(len(operators))]
        else:
            parts = min(self.parts or 1, max(len(operators), 1))
            cut = [at * parts // len(operators) for at in range(len(operators))]
        places = no_places(program)
        for number, place in zip(operators, cut, strict=True):
            places[number] = place
        return legal_partition(program, places, [Piece(f"part_{at}", at) for at in range(max(cut, default=-1) + 1)])


def _cut_by_bytes(sizes: list[int], limit: int) -> list[int]:
    cut, last, held = [], 0, 0
    for at, size in enumerate(sizes):
        if size and at and held + size > limit:
            last, held = last + 1, 0
        held += size
        cut.append(last)
    return cut
