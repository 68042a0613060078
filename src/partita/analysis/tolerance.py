"""How far numbers may differ and still count as equal."""

from __future__ import annotations

from dataclasses import dataclass

from partita._plain_help import PlainHelp
from partita.errors import OptionError


@dataclass(frozen=True, slots=True)
class Tolerance(metaclass=PlainHelp):
    """Relative and absolute distance; both zero means the same bits.

    `rounding` is for operators that run in another order than before. Values do not change, but autograd sums the
    gradients of a value that is used twice in the order in which the uses ran, and a sum in another order may round
    differently. It allows gradients, and nothing else, to differ by a few of these units, or of their dtype's if
    larger, and 0.0 to be -0.0 there; zero means that no sum may change.
    """

    relative: float = 0.0
    absolute: float = 0.0
    rounding: float = 0.0

    def __post_init__(self) -> None:
        if min(self.relative, self.absolute, self.rounding) < 0:
            raise OptionError(f"a tolerance is not negative: {self.relative}, {self.absolute}, {self.rounding}")

    def __or__(self, other: Tolerance) -> Tolerance:
        """The wider of the two."""
        return Tolerance(
            max(self.relative, other.relative),
            max(self.absolute, other.absolute),
            max(self.rounding, other.rounding),
        )


EXACT = Tolerance()
