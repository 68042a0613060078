"""Looking into an archive: what torch would act on while it loads is checked, and nothing is unpickled or run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from partita._torch.pickled import contents_of_pickle
from partita._torch.pt2_archive import Archive, Kind, kind_of, open_archive
from partita._torch.pt2_operators import NOT_REGISTERED
from partita._torch.pt2_program import SavedProgram, format_fault, saved_program
from partita.errors import ArchiveError, OptionError
from partita.graphs.archives.program_texts import texts_of
from partita.graphs.archives.report import ArchiveReport, Member, PickledMember, Problem
from partita.graphs.archives.trees import NOT_REGISTERED_CONTAINER

__all__ = ["Inspection", "archive_path", "inspect_archive", "inspected"]

#: Faults that no trust can help: somebody must import something first.
_NOT_HERE = (NOT_REGISTERED, NOT_REGISTERED_CONTAINER)


@dataclass
class Inspection:
    """What was found so far."""

    programs: dict[str, SavedProgram] = field(default_factory=dict)
    pickles: list[PickledMember] = field(default_factory=list)
    operators: dict[str, None] = field(default_factory=dict)
    custom_objects: dict[str, None] = field(default_factory=dict)
    expressions: int = 0
    guards: int = 0
    problems: list[Problem] = field(default_factory=list)


def inspect_archive(path: str | PathLike[str]) -> ArchiveReport:
    """What a `.pt2` file holds and what keeps it from being loaded, without loading it."""
    with open_archive(archive_path(path)) as archive:
        return report_of(archive, inspected(archive))


def archive_path(path: str | PathLike[str]) -> Path:
    if not isinstance(path, str | PathLike):
        raise OptionError(f"an archive is loaded from a path, not from {type(path).__name__}")
    return Path(fspath(path))


def inspected(archive: Archive) -> Inspection:
    """All checks of an archive that is open."""
    found = Inspection()
    found.problems += [Problem(name, why) for name, why in archive.odd]
    fault = format_fault(archive)
    if fault is not None:
        found.problems.append(Problem(*fault, is_danger=False))
    found.problems += _unwanted_members(archive)
    for name in archive.names(Kind.PROGRAM):
        _inspect_program(archive, name, found)
    if not archive.names(Kind.PROGRAM):
        found.problems.append(Problem("models/", "the archive holds no exported program", is_danger=False))
    return found


def report_of(archive: Archive, found: Inspection) -> ArchiveReport:
    saved = next(iter(found.programs.values()), None)
    return ArchiveReport(
        path=str(archive.path),
        programs=tuple(found.programs),
        torch_version="unknown" if saved is None else saved.torch_version,
        schema_version="unknown" if saved is None else saved.schema_version,
        members=tuple(Member(name, kind_of(name), size) for name, size in archive.sizes.items()),
        pickles=tuple(found.pickles),
        operators=tuple(sorted(found.operators)),
        custom_objects=tuple(found.custom_objects),
        expressions=found.expressions,
        guards=found.guards,
        problems=tuple(found.problems),
    )


def _unwanted_members(archive: Archive) -> Iterator[Problem]:
    for name in archive.sizes:
        kind = kind_of(name)
        if kind is Kind.NATIVE_CODE:
            yield Problem(name, "it is code of AOTInductor or another backend, which would be run as it is")
        elif kind is Kind.CUSTOM_OBJECT:
            yield Problem(name, "it is a custom object, which a pickle rebuilds by code of its own")
        elif kind is Kind.UNKNOWN:
            yield Problem(name, "nothing is known of such a member")


def _inspect_program(archive: Archive, member: str, found: Inspection) -> None:
    name = member.removeprefix("models/").removesuffix(".json")
    try:
        saved = saved_program(archive, name)
        for part, schema in saved.schemas():
            _note_texts(part, schema, found)
        for part, data in saved.pickles(archive):
            _note_pickle(part, data, found)
    except ArchiveError as error:
        found.problems.append(Problem(member, str(error), is_danger=False))
    else:
        found.programs[name] = saved


def _note_texts(member: str, schema: Any, found: Inspection) -> None:
    texts = texts_of(schema)
    found.operators.update(texts.operators)
    found.custom_objects.update(texts.custom_objects)
    found.expressions += texts.expressions
    found.guards += texts.guards
    for name in texts.custom_objects:
        found.problems.append(Problem(member, f"the program takes or holds a custom object of class {name!r}"))
    found.problems += _text_problems(member, texts.faults)


def _text_problems(member: str, faults: Iterable[tuple[str, str, str]]) -> Iterator[Problem]:
    for where, text, why in faults:
        yield Problem(member, f"{where} is {text!r}: {why}", is_danger=not why.endswith(_NOT_HERE))


def _note_pickle(member: str, data: bytes, found: Inspection) -> None:
    contents = contents_of_pickle(data)
    found.pickles.append(PickledMember(member, contents.globals))
    found.problems += [Problem(member, f"it is a pickle: {fault}") for fault in contents.faults]
