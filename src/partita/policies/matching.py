"""Policies that select by name: what they name, what a program has, and which of it was meant where nothing matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple, Protocol, final, runtime_checkable

from partita.errors import NoMatchError
from partita.near_names import near_names
from partita.program.program import Program
from partita.regions import Partition


@final
class Names(NamedTuple):
    """What a policy selects by name, and the names that a program has."""

    wanted: tuple[str, ...]
    present: tuple[str, ...]
    #: What is named, and the title of a list of such names.
    what: str
    where: str

    def hint(self) -> str:
        """The names that were meant, maybe, or else some that are there."""
        known = list(dict.fromkeys(self.present))
        near = list(dict.fromkeys(name for text in self.wanted for name in _near(text, known)))
        shown = ", ".join(map(repr, (near or known)[:5])) or "none"
        exact = [name for name in near if name in self.wanted]
        if exact:
            return (
                f"{exact[0]!r} is there, but as another kind of call, or only as nodes that take items or switch modes."
            )
        return f"did you mean {shown}?" if near else f"{self.where}: {shown}{', ...' if len(known) > 5 else '.'}"


def _near(text: str, known: Sequence[str]) -> list[str]:
    """The names that contain a word, or else those that are spelt alike."""
    word = text.strip("*.").casefold()
    containing = [name for name in known if word in name.casefold()] if len(word) >= _SHORTEST_WORD else []
    return sorted(containing, key=len)[:3] or near_names(text, known, cutoff=0.55)


#: Shorter ones are part of too many names.
_SHORTEST_WORD = 3


@runtime_checkable
class SelectsByName(Protocol):
    """A policy that selects by name, and may match nothing."""

    @property
    def allow_empty(self) -> bool: ...

    def names(self, program: Program) -> Names:
        """What it wants, and what the program has."""

    def has_match(self, partition: Partition) -> bool:
        """Whether it has found something that it names."""


def check_match(policy: SelectsByName, program: Program) -> None:
    """Raises since a policy matches nothing; a frame, which is a part of a model, need not have a match."""
    if program.frame is not None or policy.allow_empty:
        return
    names = policy.names(program)
    raise NoMatchError(
        f"{_shown(policy)} matches no {names.what}; {names.hint()} Pass allow_empty=True where that is fine"
    )


def _shown(policy: SelectsByName) -> str:
    """A policy with the options that differ from their defaults."""
    if not is_dataclass(policy):
        return repr(policy)
    given = ((option, getattr(policy, option.name)) for option in fields(policy) if option.repr)
    named = [f"{option.name}={value!r}" for option, value in given if value != option.default]
    return f"{type(policy).__name__}({', '.join(named)})"
