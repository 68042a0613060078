"""Archives: exported programs from `.pt2` files, with a look at what a file would do before it is loaded."""

from partita._torch.pt2_archive import Kind
from partita.graphs.archives.inspecting import inspect_archive
from partita.graphs.archives.loading import load_exported
from partita.graphs.archives.report import ArchiveReport, Member, PickledMember, Problem

__all__ = [
    "ArchiveReport",
    "Kind",
    "Member",
    "PickledMember",
    "Problem",
    "inspect_archive",
    "load_exported",
]
