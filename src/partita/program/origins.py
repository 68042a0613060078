"""The files that the constants of a program were loaded from, for messages."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from torch import Tensor
from torch.export import ExportedProgram
from torch.utils.weak import WeakIdKeyDictionary


def file_of(tensor: Tensor) -> str | None:
    """The file that a constant was loaded from; None where that is unknown."""
    return _FILES.get(tensor)


def with_origin(exported: ExportedProgram, file: Path) -> ExportedProgram:
    """The program, after its constants are noted as those of a file."""
    _FILES.update((value, str(file)) for value in exported.constants.values() if isinstance(value, Tensor))
    return exported


_FILES: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
