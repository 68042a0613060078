"""The zip container of a `.pt2` archive: its members and their bytes."""

from __future__ import annotations

import errno
import io
import os
import re
import reprlib
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from partita.errors import ArchiveError

#: More members than any program has, and more text than any graph: a larger file is an attempt to exhaust memory.
MOST_MEMBERS = 200_000
MOST_TEXT_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 24
#: More than the directory of an archive has: `zipfile` reads it at once, and makes an object of every 46 bytes.
MOST_DIRECTORY_BYTES = 1 << 25
_LONGEST_SHOWN = 1_000
#: What `zipfile` raises for a damaged file.
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, KeyError, RuntimeError, ValueError, NotImplementedError, struct.error)


class Kind(StrEnum):
    """What a member of an archive is."""

    FORMAT = "format"
    PROGRAM = "program"
    CONFIG = "config"
    WEIGHT = "weight"
    CONSTANT = "constant"
    CUSTOM_OBJECT = "custom object"
    SAMPLE_INPUTS = "sample inputs"
    EXTRA = "extra"
    NATIVE_CODE = "native code"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive: the sizes of its members by name, and irregularities of the container."""

    path: Path
    sizes: Mapping[str, int]
    odd: Mapping[str, str]
    _zip: zipfile.ZipFile
    _root: str

    @property
    def shown_path(self) -> str:
        """The path as messages have it."""
        return shown(str(self.path))

    def read(self, name: str) -> bytearray:
        """A copy of the bytes of a member, verified against its checksum."""
        if name not in self.sizes:
            raise ArchiveError(f"{self.shown_path} has no member {name!r}, which it needs; save the program again")
        if name in self.odd:  # A few compressed bytes may expand without limit.
            raise ArchiveError(f"member {name!r} of {self.shown_path} is not read: {self.odd[name]}")
        found, what = bytearray(), f"member {name!r} of {self.shown_path} cannot be read"
        with _damage(what, "the file is damaged, get it again"), self._zip.open(f"{self._root}/{name}") as member:
            while chunk := member.read(_CHUNK_BYTES):
                found += chunk
        return found

    def read_text(self, name: str) -> bytes:
        """The bytes of a member to be parsed, whose size is bounded."""
        if self.sizes.get(name, 0) > MOST_TEXT_BYTES:
            size = self.sizes[name]
            raise ArchiveError(f"member {name!r} of {self.shown_path} has {size} bytes, which no graph needs")
        return bytes(self.read(name))


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """The archive at `path`, which is closed afterwards."""
    what = f"{shown(str(path))} is no .pt2 archive, or only a part of one"
    with open_file(path) as file:
        with _damage(what, "save the program with torch.export.save"):
            opened = zipfile.ZipFile(_BoundedFile(io.FileIO(file.fileno(), closefd=False)))
        with opened:
            yield _archive(path, opened, os.fstat(file.fileno()).st_size)


def open_file(path: Path) -> BinaryIO:
    """The file at `path`; a pipe or a device, which may never end, is refused."""
    special = f"{shown(str(path))} is a pipe, a socket or a device; copy what it gives into a file first"
    try:
        # Without O_NONBLOCK, opening a pipe would block until it has a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # No file has such a path: it has half of a surrogate pair.
        raise ArchiveError(f"there is no file {shown(str(path))}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket, or a device without a driver.
            raise ArchiveError(special) from error
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        why = "" if error.errno == errno.ENOENT else f": {error.strerror}"
        raise ArchiveError(f"there is no file {shown(str(path))}{why}") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise ArchiveError(f"{shown(str(path))} is a directory, no file")
    raise ArchiveError(special)


class _BoundedFile(io.BufferedReader):
    """A file of which at most as much is read at once as a directory of an archive has; a hole takes no space."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MOST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"it has a directory of {size} bytes, which no archive has")
        return super().read(size)


def shown(text: str) -> str:
    """A string from a file, shortened, and quoted if it has control characters that a terminal would interpret."""
    short = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return short if short.isprintable() else repr(short)


def brief(value: object) -> str:
    """A value from a file as messages have it: Python's own text of a deep one recurses, and of a long one is long."""
    return _SHORTENED.repr(value)[:_LONGEST_BRIEF]


_LONGEST_BRIEF = 100
_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxstring = 3, _LONGEST_BRIEF


@contextmanager
def _damage(what: str, advice: str) -> Iterator[None]:
    """Converts the errors of `zipfile` for a damaged file to an ArchiveError."""
    try:
        yield
    except _ZIP_ERRORS as error:
        raise ArchiveError(f"{what}: {str(error)[:200]}; {advice}") from error  # It may name a member.
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # These mean that the directory has an invalid offset.
            raise
        raise ArchiveError(f"{what}: {error}; {advice}") from error


def _archive(path: Path, opened: zipfile.ZipFile, file_bytes: int) -> Archive:
    infos, where = opened.infolist(), shown(str(path))
    if not infos:
        raise ArchiveError(f"{where} is an empty zip file")
    if len(infos) > MOST_MEMBERS:
        raise ArchiveError(f"{where} has {len(infos)} members; no archive of a program has more than {MOST_MEMBERS}")
    root = infos[0].filename.partition("/")[0]
    # One outside of the root folder keeps its full name, with a leading slash.
    named = {f"/{info.filename}".removeprefix(f"/{root}/"): info for info in infos}
    counts = Counter(info.filename for info in infos)
    odd = {name: _oddity(info, root, counts[info.filename]) for name, info in named.items()}
    if sum(info.compress_size for info in infos) > file_bytes:
        raise ArchiveError(f"the members of {where} overlap: together they are larger than the file")
    if "archive_format" not in named:
        files = {info.filename.rpartition("/")[2] for info in infos}
        raise ArchiveError(f"{where} is {_likely(files)}; save the program with torch.export.save")
    sizes = {name: info.file_size for name, info in named.items()}
    return Archive(path, sizes, {name: why for name, why in odd.items() if why is not None}, opened, root)


def _oddity(info: zipfile.ZipInfo, root: str, count: int) -> str | None:
    """Why a member is irregular: torch never writes one like it."""
    name = info.filename
    if count > 1:
        return f"the archive has it {count} times, and readers differ in which they take"
    if not name.startswith(f"{root}/"):
        return f"it is not in the folder {root!r} of the archive"
    if "\\" in name or "\0" in name or name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        return "its name leads out of the archive, or has characters that no name has"
    if info.flag_bits & 0x1:
        return "it is encrypted"
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        return f"it is compressed: {info.compress_size} bytes become {info.file_size}"
    return None


def kind_of(name: str) -> Kind:
    """What the member called `name` is."""
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), Kind.UNKNOWN)


def _likely(names: set[str]) -> str:
    if {"version", "serialized_exported_program.json"} <= names:
        return "an archive of torch 2.7 or older, whose parts are all pickles"
    if "data.pkl" in names:
        return "a file of torch.save or TorchScript, no .pt2 archive"
    return "a zip file, but no .pt2 archive"


# torch has these in `torch.export.pt2_archive.constants`, which imports half a compiler.
_KINDS = (
    (r"archive_(format|version)|byteorder|version|\.(data/(version|serialization_id)|format_version)", Kind.FORMAT),
    (r"\.storage_alignment", Kind.FORMAT),
    (r"models/.*\.json", Kind.PROGRAM),
    (r"data/(aotinductor|executorch)/.*", Kind.NATIVE_CODE),
    (r"data/(weights|constants)/.*_config\.json", Kind.CONFIG),
    (r"data/constants/(custom|opaque)_obj_.*", Kind.CUSTOM_OBJECT),
    (r"data/weights/.*", Kind.WEIGHT),
    (r"data/constants/.*", Kind.CONSTANT),
    (r"data/sample_inputs/.*", Kind.SAMPLE_INPUTS),
    (r"extra/.*", Kind.EXTRA),
)
