"""Loading an exported program from a `.pt2` file, as data or with torch's loader if trusted; reports on archives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import final

import torch
from torch.export import ExportedProgram

from partita._torch.gc_pause import gc_paused
from partita._torch.modes import fresh_modes
from partita._torch.tensors import is_lack_of_memory
from partita.errors import ArchiveError, OptionError, UntrustedArchiveError
from partita.program._torch.trusted_archives import load_trusted
from partita.program.archives.container import Archive, Kind, kind_of, open_archive, open_file, shown
from partita.program.archives.data import NotDataError, RefusedError
from partita.program.exported import with_origin

_SHOWN = 5
#: How many programs of one archive are inspected; each may have sizes that take seconds.
_MOST_PROGRAMS = 8
#: torch's own loader is not thread-safe.
_LOCK = threading.RLock()


def load_exported(
    path: str | PathLike[str], *, trusted: bool = False, operators: Collection[str] = ()
) -> ExportedProgram:
    """The exported program in a `.pt2` file.

    Without `trusted`, the file is read as data: what is more than data is excluded or refused. `operators` are
    namespaces of operators, or operators `namespace::name`, that it may name beside those of torch. With `trusted`,
    `torch.export.load` loads it, which can run arbitrary code in the file.
    """
    file, allowed = _path(path), _allowed(operators)
    # Tensors loaded under inference mode could never be mutated or trained.
    with _LOCK, fresh_modes(grad=True), gc_paused():
        if trusted:
            open_file(file).close()
            return with_origin(load_trusted(file), file)
        with open_archive(file) as archive:
            reading = _Reading(archive, allowed)
            _refuse(archive, reading.problems)
            name = reading.chosen()
            made = None if name is None else reading.exported(name)
            _refuse(archive, reading.problems)
            assert made is not None
            return with_origin(made, file)


def inspect_archive(path: str | PathLike[str], *, operators: Collection[str] = ()) -> ArchiveReport:
    """The contents of a `.pt2` file and what prevents loading a program in it; its weights are not read."""
    file, allowed = _path(path), _allowed(operators)
    with _LOCK, fresh_modes(grad=True), gc_paused(), open_archive(file) as archive:
        reading = _Reading(archive, allowed, is_read=False)
        reading.chosen()
        for name in reading.programs[:_MOST_PROGRAMS]:
            reading.exported(name)
        for name in reading.programs[_MOST_PROGRAMS:]:
            reading.note(f"models/{name}.json", f"it is not inspected, since {_MOST_PROGRAMS} others were")
        return ArchiveReport(
            path=str(archive.path),
            programs=tuple(reading.programs),
            torch_version=reading.torch_version,
            schema_version=reading.schema_version,
            members=tuple(Member(name, kind_of(name), size) for name, size in archive.sizes.items()),
            operators=tuple(sorted(reading.operators)),
            problems=tuple(reading.problems),
        )


def _path(path: str | PathLike[str]) -> Path:
    found = fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(found, str) or "\0" in found:
        given = repr(found) if isinstance(found, str) else type(found).__name__
        raise OptionError(f"an archive is loaded from a path, not from {given}")
    return Path(found)


def _allowed(operators: Collection[str]) -> frozenset[str]:
    if isinstance(operators, str) or not all(isinstance(name, str) for name in operators):
        raise OptionError(f"`operators` is a collection of texts, such as ['mylib', 'lib::op'], not {operators!r}")
    return frozenset(operators)


class _Reading:
    """Reads one archive, and collects its problems."""

    def __init__(self, archive: Archive, allowed: frozenset[str], *, is_read: bool = True) -> None:
        self._archive = archive
        self._allowed = allowed
        self._is_read = is_read
        members = [name for name in archive.sizes if kind_of(name) is Kind.PROGRAM]
        self.programs = [member.removeprefix("models/").removesuffix(".json") for member in members]
        self.torch_version = self.schema_version = "unknown"
        self.operators: dict[str, None] = {}
        self.problems: list[Problem] = []
        self._check_container()

    def _check_container(self) -> None:
        """Finds members that torch never writes, and members that are more than data whatever their content."""
        archive = self._archive
        self.problems += [Problem(name, why) for name, why in archive.odd.items()]
        for member, wanted in (("archive_format", "pt2"), ("archive_version", "0"), ("byteorder", sys.byteorder)):
            is_there = member in archive.sizes and member not in archive.odd
            found = archive.read_text(member)[:40].decode(errors="replace").strip() if is_there else wanted
            if found != wanted:
                self.note(member, f"it says {found[:40]!r}, and only {wanted!r} can be read here")
        kinds = ((name, kind_of(name)) for name in archive.sizes)
        self.problems += [Problem(name, _UNWANTED[kind]) for name, kind in kinds if kind in _UNWANTED]

    def chosen(self) -> str | None:
        """The program called "model", as torch.export.save names it, or the only one; None if there is no such."""
        names = self.programs
        if "model" in names or len(names) == 1:
            return "model" if "model" in names else names[0]
        listed = ", ".join(map(repr, sorted(names)[:_MOST_PROGRAMS]))
        several = f"it holds several programs, {listed}, and none called 'model'; save each on its own"
        self.note("models/", several if names else "the archive holds no exported program")
        return None

    def exported(self, name: str) -> ExportedProgram | None:
        """A program of the archive; None if there is a problem."""
        # These modules import half of torch.export.
        from partita.program.archives._torch.program import SavedProgram
        from partita.program.archives._torch.weights import Weights

        member = f"models/{name}.json"
        try:
            saved = SavedProgram(self._archive.read_text(member))
            self.torch_version, self.schema_version = saved.torch_version, saved.schema_version
            weights, tables = Weights(self._archive, is_read=self._is_read), []
            for folder in ("weights", "constants"):
                member = f"data/{folder}/{name}_{folder}_config.json"
                tables.append(weights.of(folder, name))
            member = f"models/{name}.json"
            made = saved.exported(tables[0], tables[1], self._allowed)
            self.operators.update(saved.operators)
            return made
        except RefusedError as error:
            self.note(error.member or member, str(error), is_danger=isinstance(error, NotDataError))
        except ArchiveError as error:
            self.note(member, str(error))
        except Exception as error:
            if isinstance(error, OSError) or is_lack_of_memory(error):
                raise  # The file is not to blame.
            # torch's verifier and shape environment may raise any error for an inconsistent program.
            last = [line for line in str(error).splitlines() if line.strip()][-1:] or ["no more is known"]
            reason = f"{type(error).__name__}: {last[0].strip()[:300]}"
            self.note(member, f"torch {torch.__version__} cannot build a program from it: {reason}")
        return None

    def note(self, member: str, what: str, *, is_danger: bool = False) -> None:
        self.problems.append(Problem(member, what, is_danger=is_danger))


_UNWANTED = {
    Kind.NATIVE_CODE: "it is code of AOTInductor or another backend, which would be run as it is",
    Kind.CUSTOM_OBJECT: "it is a custom object, which a pickle rebuilds by code of its own",
    Kind.UNKNOWN: "it is an unknown kind of member",
}


def _refuse(archive: Archive, problems: list[Problem]) -> None:
    """Raises if there are problems."""
    dangers = [problem for problem in problems if problem.is_danger]
    shown = dangers or problems
    reasons = "; ".join(map(str, shown[:_SHOWN])) + (f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
    if dangers:
        raise UntrustedArchiveError(
            f"{archive.shown_path} is not loaded, because it is more than data: {reasons}. Nothing of it was run. If "
            "you trust its source, load it with trusted=True"
        )
    if problems:
        raise ArchiveError(f"{archive.shown_path} cannot be loaded: {reasons}")


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
        yield f"{shown(self.path)} {verdict}: torch {self.torch_version}, schema {self.schema_version}"
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
