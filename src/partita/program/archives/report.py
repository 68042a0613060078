"""Reports on archives: their contents, and what prevents loading them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from partita.program.archives.container import Kind


def shown(text: str) -> str:
    """A string from a file, quoted if it has control characters that a terminal would interpret."""
    return text if text.isprintable() else repr(text)


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive."""

    name: str
    kind: Kind
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """Why an archive is not loaded: the member, and what is wrong with it.

    A problem that `is_danger` is more than data; the others prevent reading the file at all, trusted or not.
    """

    member: str
    what: str
    is_danger: bool = True

    def __str__(self) -> str:
        return f"{shown(self.member)}: {shown(self.what)}"


@final
@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """The contents of an archive; `problems` is empty if it can be loaded without trust."""

    path: str
    programs: tuple[str, ...]
    torch_version: str
    schema_version: str
    members: tuple[Member, ...]
    operators: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def is_plain(self) -> bool:
        """Whether nothing in the archive needs trust or prevents reading it."""
        return not self.problems

    @property
    def unread(self) -> tuple[Member, ...]:
        """The members that are excluded when the archive is loaded without trust."""
        return tuple(member for member in self.members if member.kind in (Kind.SAMPLE_INPUTS, Kind.EXTRA))

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
                names = ", ".join(shown(member.name) for member in members[:3]) + (", ..." if len(members) > 3 else "")
                yield f"  {kind:<14} {len(members):>4}  {sum(member.bytes for member in members):>10,} bytes  {names}"
        yield f"  {len(self.operators)} operators"
        if self.unread:
            yield f"  excluded: {', '.join(shown(member.name) for member in self.unread)}"
        for problem in self.problems:
            yield f"  ! {problem}"
