"""Compiled functions in a folder that the user names: what one process has compiled, the next one loads.

An entry is found by the code of the body, the backend with its options, and the versions and settings of everything
that has a say in it; which calls it serves, it says itself. Entries are written whole or not at all, and checked when
they are read. They hold code: users who can write to the folder decide what runs.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita._torch.fx.structural_hash import digest_of_body
from partita.backends._torch.settings import compiler_settings, digest_of_partita, instructions, vectors
from partita.errors import OptionError
from partita.lowering._torch.origins import foreign_code, packages_behind
from partita.lowering.kernel_files import kernel_files
from partita.whole_files import write_whole

log = logging.getLogger(__name__)

#: The start of every entry; another number is another format.
_MAGIC = b"partita function 2\n"
_DIGEST_SIZE = 32


@final
@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The entries of one body."""

    root: Path
    #: A digest of the body and of what functions are specialized on.
    code: str
    #: The backend, with its options.
    backend: str

    @classmethod
    def of(cls, root: str | os.PathLike[str], body: GraphModule, backend: Any, *options: object) -> CacheFolder | None:
        """The folder for a body and a backend; None for a body with code that may be another one in the next process.

        `options` are further things that functions are specialized on; their `repr` counts.
        """
        foreign = next(foreign_code(body), None)
        if foreign is not None:
            log.info("%s is not cached in a folder: its code may change between processes", foreign)
            return None
        marks = [str(node.meta.get("recompute")) for node in body.graph.nodes]
        marks += packages_behind(body)
        kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
        described = f"{kind} {backend!r} {getattr(backend, 'version', None)}"
        return cls(Path(root), _digest(digest_of_body(body), *marks, *map(repr, options)), described)

    @property
    def folder(self) -> Path:
        """Where the entries are that were made with the versions and settings of now."""
        return self.root / _digest(self.code, self.backend, *_environment())

    def kernels(self) -> AbstractContextManager[None]:
        """Makes Inductor's kernels be kept here as well, without which stored functions have to be built again."""
        return kernel_files(self.root).used()

    def entries(self) -> Iterator[Any]:
        """What was stored, in any order; an entry that cannot be read is reported and skipped."""
        folder = self.folder
        for path in sorted(folder.glob("*.function")):
            try:
                entry = _unpacked(path.read_bytes(), folder.name)
            except FileNotFoundError:
                continue  # Another process has just found it damaged.
            except Exception as error:
                log.warning("%s is damaged, so it is removed and its function compiled again: %s", path, error)
                with suppress(OSError):  # The folder may be one to read only.
                    path.unlink()
                continue
            yield entry

    def store(self, entry: object) -> None:
        """Writes an entry; a failure is reported, since the function is there all the same."""
        try:
            folder = self.folder
            data = _packed(entry, folder.name)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{blake2b(data, digest_size=16).hexdigest()}.function", data)
        except Exception as error:
            log.warning("a function cannot be written to %s: %s", self.root, error)


def checked_root(root: object) -> None:
    """Raises unless `root` names a folder, or nothing that is there yet."""
    if not isinstance(root, str | os.PathLike):
        raise OptionError(f"cache is a folder for compiled functions, not {root!r}")
    if Path(root).exists() and not Path(root).is_dir():
        raise OptionError(f"cache is a folder for compiled functions, and {os.fspath(root)!r} is a file")


def _packed(entry: object, key: str) -> bytes:
    data = pickle.dumps(entry)
    return _MAGIC + _keyed_digest(data, key) + data


def _unpacked(packed: bytes, key: str) -> Any:
    if not packed.startswith(_MAGIC):
        raise ValueError("it begins differently")
    digest, data = packed[len(_MAGIC) :][:_DIGEST_SIZE], packed[len(_MAGIC) + _DIGEST_SIZE :]
    if _keyed_digest(data, key) != digest:
        raise ValueError("its contents do not have its digest, or belong to another folder")
    return pickle.loads(data)


def _keyed_digest(data: bytes, key: str) -> bytes:
    """A digest of the contents and of what they were compiled for: an entry at the place of another is damaged."""
    return blake2b(data, digest_size=_DIGEST_SIZE, key=key.encode()).digest()


def _digest(*texts: str) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def _environment() -> Iterator[str]:
    """Everything beside the body that decides what a compiler makes of it."""
    yield from (
        digest_of_partita(),
        _version_of("partita"),
        torch.__version__,
        sys.version,
        sys.platform,
        platform.machine(),
    )
    yield from platform.libc_ver()
    yield from (vectors(), *instructions())
    yield compiler_settings()
    if torch.cuda.is_available():
        yield from (_version_of("triton"), torch.version.cuda or "", torch.version.hip or "")
        for device in range(torch.cuda.device_count()):
            yield f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
