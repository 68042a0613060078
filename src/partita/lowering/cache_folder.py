"""Compiled functions in a folder that the user names: what one process has compiled, the next one loads.

An entry is found by the code of the body, the backend with its options, and the versions of everything that has a say
in it; which calls it serves, it says itself. Entries are written whole or not at all, and checked when they are read.
They hold code: whoever can write to the folder decides what runs.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita._torch.fx.structural_hash import digest_of_body, foreign_code
from partita.backends._torch.compile import compiler_settings
from partita.errors import OptionError

log = logging.getLogger(__name__)

#: The start of every entry; another number is another format.
_MAGIC = b"partita function 1\n"
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
        kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
        described = f"{kind} {backend!r} {getattr(backend, 'version', None)}"
        return cls(Path(root), _digest(digest_of_body(body), *marks, *map(repr, options)), described)

    @property
    def folder(self) -> Path:
        """Where the entries are that were made with the versions and settings of now."""
        return self.root / _digest(self.code, self.backend, *_environment())

    def entries(self) -> Iterator[Any]:
        """What was stored, in any order; an entry that cannot be read is reported and left out."""
        for path in sorted(self.folder.glob("*.function")):
            try:
                yield _unpacked(path.read_bytes())
            except Exception as error:
                log.warning("%s is damaged or of another version, so its function is compiled again: %s", path, error)

    def store(self, entry: object) -> None:
        """Writes an entry; a failure is reported, since the function is there all the same."""
        try:
            data = _packed(entry)
            folder, name = self.folder, blake2b(data, digest_size=16).hexdigest()
            folder.mkdir(parents=True, exist_ok=True)
            # Whoever reads at the same time finds all of it or nothing.
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
                file.write(data)
            os.replace(file.name, folder / f"{name}.function")
        except Exception as error:
            log.warning("a function cannot be written to %s: %s", self.root, error)


def checked_root(root: object) -> None:
    """Raises unless `root` names a folder, or nothing that is there yet."""
    if not isinstance(root, str | os.PathLike):
        raise OptionError(f"cache is a folder for compiled functions, not {root!r}")
    if Path(root).exists() and not Path(root).is_dir():
        raise OptionError(f"cache is a folder for compiled functions, and {os.fspath(root)!r} is a file")


def _packed(entry: object) -> bytes:
    data = pickle.dumps(entry)
    return _MAGIC + blake2b(data, digest_size=_DIGEST_SIZE).digest() + data


def _unpacked(packed: bytes) -> Any:
    if not packed.startswith(_MAGIC):
        raise ValueError("it begins differently")
    digest, data = packed[len(_MAGIC) :][:_DIGEST_SIZE], packed[len(_MAGIC) + _DIGEST_SIZE :]
    if blake2b(data, digest_size=_DIGEST_SIZE).digest() != digest:
        raise ValueError("its contents do not have its digest")
    return pickle.loads(data)


def _digest(*texts: str) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def _environment() -> Iterator[str]:
    """Everything beside the body that decides what a compiler makes of it."""
    try:
        yield version("partita")
    except PackageNotFoundError:
        yield "from source"
    yield from (torch.__version__, sys.version, sys.platform, torch.backends.cpu.get_cpu_capability())
    yield compiler_settings()
    if torch.cuda.is_available():
        yield from (torch.version.cuda or "", *map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
