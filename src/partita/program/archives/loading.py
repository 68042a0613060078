"""Loading an exported program from a `.pt2` file: as untrusted data, or with torch's loader if it is trusted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, MutableMapping
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils.weak import WeakIdKeyDictionary

from partita._torch.modes import fresh_modes
from partita.errors import ArchiveError, OptionError, UntrustedArchiveError
from partita.program._torch.trusted_archives import load_trusted
from partita.program.archives.container import Archive, Kind, kind_of, open_archive, open_file
from partita.program.archives.data import Data, MalformedError, NotDataError, RefusedError
from partita.program.archives.report import ArchiveReport, Member, Problem

_SHOWN = 5
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
    with _LOCK, fresh_modes(grad=True):
        if trusted:
            open_file(file).close()
            loaded = load_trusted(file)
            _note_file(loaded, file)
            return loaded
        with open_archive(file) as archive:
            reading = _Reading(archive, allowed)
            reading.check_container()
            _refuse(archive, reading.problems)
            made = reading.exported()
            _refuse(archive, reading.problems)
            assert made is not None
            _note_file(made, file)
            return made


def file_of(tensor: Tensor) -> str | None:
    """The file that a constant was loaded from, for messages; None where that is unknown."""
    return _FILES.get(tensor)


def _note_file(exported: ExportedProgram, file: Path) -> None:
    for value in exported.constants.values():
        if isinstance(value, Tensor):
            _FILES[value] = str(file)


#: The files that constants were loaded from.
_FILES: MutableMapping[Tensor, str] = WeakIdKeyDictionary()


def inspect_archive(path: str | PathLike[str], *, operators: Collection[str] = ()) -> ArchiveReport:
    """The contents of a `.pt2` file and what prevents loading it; its weights are not read."""
    file, allowed = _path(path), _allowed(operators)
    with _LOCK, fresh_modes(grad=True), open_archive(file) as archive:
        reading = _Reading(archive, allowed, is_read=False)
        reading.check_container()
        reading.exported()
        return ArchiveReport(
            path=str(archive.path),
            programs=tuple(_programs(archive)),
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
        raise OptionError(
            f"`operators` is a collection of texts, such as ['mylib'] or ['mylib::op'], not {operators!r}"
        )
    return frozenset(operators)


class _Reading:
    """Reads one archive, and collects its problems."""

    def __init__(self, archive: Archive, allowed: frozenset[str], *, is_read: bool = True) -> None:
        self._archive = archive
        self._allowed = allowed
        self._is_read = is_read
        self.torch_version = self.schema_version = "unknown"
        self.operators: dict[str, None] = {}
        self.problems: list[Problem] = []

    def check_container(self) -> None:
        """Finds members that torch never writes, and members that are more than data whatever their content."""
        archive = self._archive
        self.problems += [Problem(name, why) for name, why in archive.odd]
        odd = {name for name, _ in archive.odd}
        for member, wanted in (("archive_format", "pt2"), ("archive_version", "0"), ("byteorder", sys.byteorder)):
            is_there = member in archive.sizes and member not in odd
            found = archive.read_text(member)[:40].decode(errors="replace").strip() if is_there else wanted
            if found != wanted:
                self._note(member, f"it says {found[:40]!r}, and only {wanted!r} can be read here")
        kinds = {name: kind_of(name) for name in archive.sizes}
        self.problems += [Problem(name, _UNWANTED[kind]) for name, kind in kinds.items() if kind in _UNWANTED]

    def exported(self) -> ExportedProgram | None:
        """The program called "model", as torch.export.save names it, or the only one; None if there is a problem."""
        # These modules import half of torch.export.
        from partita.program.archives._torch.program import SavedProgram
        from partita.program.archives._torch.weights import Weights

        names, member = sorted(_programs(self._archive)), "models/"
        name = "model" if "model" in names or not names else names[0]
        try:
            if not names:
                raise MalformedError("the archive holds no exported program")
            if name != "model" and len(names) > 1:
                listed = ", ".join(map(repr, names))
                raise MalformedError(
                    f"it holds several programs, {listed}, and none called 'model'; save each on its own"
                )
            member = f"models/{name}.json"
            saved = SavedProgram(Data.of(self._archive.read_text(member)))
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
            self._note(error.member or member, str(error), is_danger=isinstance(error, NotDataError))
        except ArchiveError as error:
            self._note(member, str(error))
        except (MemoryError, torch.OutOfMemoryError, OSError):
            raise  # The file is not to blame.
        except Exception as error:
            # torch's verifier and shape environment may raise any error for an inconsistent program.
            reason = f"{type(error).__name__}: {_last_line(error)}"
            self._note(member, f"torch {torch.__version__} cannot build a program from it: {reason}")
        return None

    def _note(self, member: str, what: str, *, is_danger: bool = False) -> None:
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
            f"{archive.path} is not loaded, because it is more than data: {reasons}. Nothing of it was run. If you "
            "trust its source, load it with trusted=True"
        )
    if problems:
        raise ArchiveError(f"{archive.path} cannot be loaded: {reasons}")


def _programs(archive: Archive) -> list[str]:
    return [member.removeprefix("models/").removesuffix(".json") for member in archive.names(Kind.PROGRAM)]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no more is known"
