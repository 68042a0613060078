"""Loading an exported program from a `.pt2` file, by a trust model: data may be loaded from anyone, code may not."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from partita._torch.capture_fresh_modes import fresh_modes
from partita._torch.pt2_archive import Archive, open_archive, open_zip
from partita._torch.pt2_program import SavedProgram, exported_program
from partita.errors import ArchiveError, UntrustedArchiveError
from partita.graphs.archives.inspecting import Inspection, archive_path, inspected
from partita.graphs.archives.report import CHECKS

__all__ = ["load_exported"]

_SHOWN = 5


def load_exported(path: str | PathLike[str], *, trusted: bool = False) -> ExportedProgram:
    """The exported program in a `.pt2` file.

    Without `trusted`, everything that torch would act on is checked first, and pickles are loaded by torch's
    weights-only loader or not at all. With it, `torch.export.load` has its way, which can run any code in the file.
    """
    file = archive_path(path)
    with fresh_modes(grad=True):  # What is loaded under inference mode could never be written or trained.
        if trusted:
            return _tied(_loaded_by_torch(file))
        with open_archive(file) as archive:
            found = inspected(archive)
            _refuse(archive, found)
            return _tied(exported_program(archive, _only_program(archive, found)))


def _tied(exported: ExportedProgram) -> ExportedProgram:
    """The program with one parameter again where several names share one memory; torch makes one for each name."""
    state: dict[str, Any] = exported.state_dict
    known: dict[Hashable, nn.Parameter] = {}
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and tensor.data_ptr():  # Without memory nothing is shared.
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
            state[name] = known.setdefault(memory, tensor)
    return exported


def _loaded_by_torch(file: Path) -> ExportedProgram:
    open_zip(file).close()
    try:
        with _quiet(logging.getLogger("torch._export.serde.serialize")):
            return torch.export.load(file)
    except Exception as error:
        raise ArchiveError(f"{file} is trusted, but torch cannot load it: {type(error).__name__}: {error}") from error


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """torch 2.13 logs with one argument too few when it unpickles, which a strict log handler turns into an error."""
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _refuse(archive: Archive, found: Inspection) -> None:
    """Raises where the checks found something."""
    if not found.problems:
        return
    dangers = [problem for problem in found.problems if problem.is_danger]
    shown = dangers or found.problems
    told = "; ".join(map(str, shown[:_SHOWN])) + (f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
    if not dangers:
        raise ArchiveError(f"{archive.path} cannot be loaded: {told}")
    checked = "; ".join(CHECKS)
    raise UntrustedArchiveError(
        f"{archive.path} is not loaded, because it could run code: {told}. Nothing of it was run. Checked were: "
        f"{checked}. If you trust whoever made the file, load it with trusted=True"
    )


def _only_program(archive: Archive, found: Inspection) -> SavedProgram:
    """The program called "model", as torch.export.save calls it, or the only one."""
    programs = found.programs
    if "model" in programs:
        return programs["model"]
    if len(programs) == 1:
        return next(iter(programs.values()))
    names = ", ".join(map(repr, sorted(programs)))
    raise ArchiveError(f"{archive.path} holds several programs, {names}, and none called 'model'; save each on its own")
