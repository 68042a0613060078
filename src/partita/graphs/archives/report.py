"""What an archive holds and what was checked in it, as data that prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from partita._torch.pt2_archive import Kind

__all__ = ["CHECKS", "ArchiveReport", "Member", "PickledMember", "Problem"]

#: What is looked at before anything is loaded.
CHECKS = (
    "members: known names, inside the archive, each once, stored as they are, together no larger than the file",
    "pickles: read opcode by opcode, never run; they may name only what torch's weights-only loader takes",
    "custom objects and native code: none",
    "operators: registered ones, by name, that touch no files; not any function that torch can reach",
    "expressions and guards: arithmetic on sizes of inputs, within bounds",
    "names and paths: nothing that could end a name or a string in generated code",
    "trees: registered containers; no module is imported for a key or a factory",
)


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive."""

    name: str
    kind: Kind
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class PickledMember:
    """A member that is a pickle, and the classes and functions that it names."""

    name: str
    globals: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """Why an archive is not loaded: the member, and what is wrong with it.

    One that `is_danger` could run code; the others keep a file from being read at all, trusted or not.
    """

    member: str
    what: str
    is_danger: bool = True

    def __str__(self) -> str:
        return f"{self.member}: {self.what}"


@final
@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What an archive holds; `problems` is empty where it can be loaded without being trusted."""

    path: str
    programs: tuple[str, ...]
    torch_version: str
    schema_version: str
    members: tuple[Member, ...]
    pickles: tuple[PickledMember, ...]
    operators: tuple[str, ...]
    custom_objects: tuple[str, ...]
    expressions: int
    guards: int
    problems: tuple[Problem, ...]

    @property
    def is_plain(self) -> bool:
        """Whether nothing in the archive needs trust, or keeps it from being read."""
        return not self.problems

    def of_kind(self, kind: Kind | str) -> tuple[Member, ...]:
        """The members of one kind."""
        return tuple(member for member in self.members if member.kind == kind)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = "can be loaded" if self.is_plain else "is not loaded"
        yield f"{self.path} {verdict}: torch {self.torch_version}, schema {self.schema_version}"
        for kind in Kind:
            members = self.of_kind(kind)
            if members:
                names = ", ".join(member.name for member in members[:3]) + (", ..." if len(members) > 3 else "")
                yield f"  {kind:<14} {len(members):>4}  {sum(member.bytes for member in members):>10,} bytes  {names}"
        for pickled in self.pickles:
            yield f"  pickle {pickled.name} names {', '.join(pickled.globals) or 'nothing'}"
        yield f"  {len(self.operators)} operators, {self.expressions} expressions, {self.guards} guards"
        if self.custom_objects:
            yield f"  custom objects: {', '.join(self.custom_objects)}"
        for problem in self.problems:
            yield f"  ! {problem}"
