"""Archives: exported programs from `.pt2` files, read as untrusted data."""

from partita.program.archives.container import Kind
from partita.program.archives.loading import ArchiveReport, Member, Problem, inspect_archive, load_exported

__all__ = ["ArchiveReport", "Kind", "Member", "Problem", "inspect_archive", "load_exported"]
