"""Archives: exported programs from `.pt2` files, read as untrusted data."""

from partita.program.archives.container import Kind
from partita.program.archives.loading import inspect_archive, load_exported
from partita.program.archives.report import ArchiveReport, Member, Problem

__all__ = ["ArchiveReport", "Kind", "Member", "Problem", "inspect_archive", "load_exported"]
