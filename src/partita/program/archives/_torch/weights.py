"""Parameters, buffers and constants of a saved program: tensors over the raw bytes of the file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from partita._torch.tensors import is_lack_of_memory
from partita.errors import ArchiveError
from partita.program.archives._torch.symbols import read_device, read_dtype
from partita.program.archives.container import Archive
from partita.program.archives.data import Data, MalformedError, NotDataError

#: Tensors may alias, so that together they seem larger than the file, but not by more than this.
_MOST_TIMES = 16
_MOST_BYTES_BEYOND = 1 << 28


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    """The layout of a tensor in the bytes of a member."""

    member: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_parameter: bool
    needs_gradient: bool

    def check(self, bytes_there: int) -> None:
        """Raises unless every element lies inside these bytes."""
        if len(self.sizes) != len(self.strides) or len(self.sizes) > 64:
            raise MalformedError(f"it has {len(self.sizes)} sizes and {len(self.strides)} strides", self.member)
        if min((*self.sizes, *self.strides, self.offset)) < 0:
            raise MalformedError(f"it has sizes {self.sizes} and strides {self.strides}", self.member)
        last = self.offset + sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        if math.prod(self.sizes) and (last + 1) * self.dtype.itemsize > bytes_there:
            raise MalformedError(f"it has {bytes_there} bytes, too few for sizes {self.sizes}", self.member)
        if self.needs_gradient and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise MalformedError(f"it is a tensor of {self.dtype} that needs a gradient", self.member)


class Weights:
    """The tensors of an archive; the same bytes with the same layout are one tensor."""

    def __init__(self, archive: Archive, *, is_read: bool = True) -> None:
        self._archive = archive
        self._is_read = is_read
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        #: By the text of a layout: a file can have any number of layouts with the same hash.
        self._made: dict[str, Tensor] = {}
        self._bytes_left = _MOST_TIMES * sum(archive.sizes.values()) + _MOST_BYTES_BEYOND

    def of(self, folder: str, program: str) -> dict[str, Tensor]:
        """The tensors in a folder that belong to a program; on the meta device unless `is_read`."""
        old = f"data/{folder}/{program}.pt"
        if old in self._archive.sizes:
            raise NotDataError("it is a pickle, which only code can read; save the program again", old)
        listed = Data.of(self._archive.read_text(f"data/{folder}/{program}_{folder}_config.json"))["config"]
        return {Data(key, listed, "a key").state_path(): self._tensor(folder, data) for key, data in listed.entries()}

    def _tensor(self, folder: str, data: Data) -> Tensor:
        file = data["path_name"].text()
        member = f"data/{folder}/{file}"
        if not re.fullmatch(r"\w{1,200}", file, re.ASCII):
            data.refuse(f"{file[:100]!r} is no name of a member")
        if data["use_pickle"].boolean():
            raise NotDataError("it is a pickle, of a tensor subclass or another object, which only code reads", member)
        if member not in self._archive.sizes:
            raise MalformedError("the archive does not have it, and needs it; save the program again", member)
        meta = data["tensor_meta"]
        found = _Tensor(
            member,
            read_dtype(meta["dtype"]),
            read_device(meta["device"]),
            tuple(size["as_int"].integer() for size in meta["sizes"]),
            tuple(stride["as_int"].integer() for stride in meta["strides"]),
            meta["storage_offset"]["as_int"].integer(),
            data["is_param"].boolean(),
            meta["requires_grad"].boolean(),
        )
        layout = repr(found)
        if layout not in self._made:
            found.check(self._archive.sizes[member])
            self._bytes_left -= math.prod(found.sizes) * found.dtype.itemsize
            if self._bytes_left < 0:
                raise MalformedError(f"with sizes {found.sizes}, the tensors look far larger than the file", member)
            self._made[layout] = self._made_of(found)
        return self._made[layout]

    def _made_of(self, found: _Tensor) -> Tensor:
        if not self._is_read or 0 in found.sizes:
            device = "cpu" if self._is_read else "meta"
            made = torch.empty_strided(found.sizes, found.strides, dtype=found.dtype, device=device)
            made = _moved(made, found.device) if self._is_read else made
        else:
            if (found.member, found.device) not in self._memory:
                data = torch.frombuffer(self._archive.read(found.member), dtype=torch.uint8)
                self._memory[found.member, found.device] = _moved(data, found.device)
            whole = self._memory[found.member, found.device]
            whole = whole[: whole.numel() // found.dtype.itemsize * found.dtype.itemsize].view(found.dtype)
            made = torch.as_strided(whole, found.sizes, found.strides, found.offset)
        if found.is_parameter:
            return nn.Parameter(made, requires_grad=found.needs_gradient)
        return made.requires_grad_(found.needs_gradient)


def _moved(data: Tensor, device: torch.device) -> Tensor:
    try:
        # A copy has memory that torch can resize; a tensor that it fails to resize has its new size all the same.
        return data.to(device, copy=True)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        if is_lack_of_memory(error):
            raise
        raise ArchiveError(f"its weights are on {device}, which is not available here") from error
