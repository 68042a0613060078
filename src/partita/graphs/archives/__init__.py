"""Archives: exported programs from `.pt2` files, which are taken as data."""

from partita.graphs.archives.container import Kind
from partita.graphs.archives.loading import inspect_archive, load_exported
from partita.graphs.archives.report import ArchiveReport, Member, Problem

__all__ = [
    "ArchiveReport",
    "Kind",
    "Member",
    "Problem",
    "inspect_archive",
    "load_exported",
]
