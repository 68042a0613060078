"""Loading trusted archives with torch's own loader, with its bugs worked around.

It is outside of `archives`, which reads files as data alone: nothing there can reach a loader that runs code.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from partita._torch.tensors import is_lack_of_memory
from partita.errors import ArchiveError


def load_trusted(file: Path) -> ExportedProgram:
    """The exported program in a file, which can run arbitrary code while it is loaded."""
    try:
        with _quiet(logging.getLogger("torch._export.serde.serialize")):
            return _tied(torch.export.load(file))
    except Exception as error:
        if isinstance(error, OSError | ImportError) or is_lack_of_memory(error):
            raise  # The file is not to blame.
        raise ArchiveError(f"{file} is trusted, but torch cannot load it: {type(error).__name__}: {error}") from error


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """torch 2.13 logs with one argument too few when it unpickles, which a strict log handler turns into an error."""
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _tied(exported: ExportedProgram) -> ExportedProgram:
    """The program with tied parameters restored: torch makes one parameter for each name that shares a storage."""
    state: dict[str, Any] = exported.state_dict
    known: dict[Hashable, nn.Parameter] = {}
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and tensor.data_ptr():  # Without memory nothing is shared.
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
            state[name] = known.setdefault(memory, tensor)
    return exported
