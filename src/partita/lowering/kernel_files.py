"""The kernels in a cache folder, and Inductor's own caches there, checked when they are taken out of it.

Inductor builds libraries where it looks for them, checks none, and a process that calls one that was cut off ends. So
it builds in a temporary folder of this process. What it has built there is copied into the cache folder, whole or not
at all, under a name with its digest; the next process copies what has its digest into a temporary folder of its own,
and builds the rest.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import final

from partita.backends._torch.settings import kernels_in, own_kernels
from partita.whole_files import write_whole

log = logging.getLogger(__name__)


def kernel_files(root: Path) -> KernelFiles:
    """Those of a cache folder, for this process; a fork of it has its own."""
    return _kernel_files(os.path.abspath(root), os.getpid())


@cache
def _kernel_files(root: str, process: int) -> KernelFiles:
    return KernelFiles(Path(root) / "kernels", process)


@final
class KernelFiles:
    """Copies of files, `folder/name.digest`, and the folder in which this process makes and loads them."""

    def __init__(self, copies: Path, process: int) -> None:
        self._copies = copies
        #: The copies that are in the folder of this process, and the files there that have a copy.
        self._known: set[Path] = set()
        self._kept: set[Path] = set()
        parent = own_kernels()
        if parent is not None:
            os.makedirs(parent, exist_ok=True)
        self._own = Path(tempfile.mkdtemp(prefix="partita_kernels_", dir=parent))
        atexit.register(_remove, self._own, process)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Makes Inductor find what is in the cache folder; what it builds inside the block is copied there."""
        self._take_out()
        with kernels_in(self._own):
            yield
        self._keep()

    def _take_out(self) -> None:
        for copy in sorted(path for path in self._copies.rglob("*") if len(path.suffix) == _SUFFIX):
            place = copy.relative_to(self._copies).with_suffix("")
            if copy in self._known or (self._own / place).exists():
                continue
            try:
                data = copy.read_bytes()
            except OSError:
                continue  # Another process has just found it damaged.
            if _digest(place, data) != copy.suffix[1:]:
                log.warning("%s is damaged, so it is removed and built again", copy)
                with suppress(OSError):  # The folder may be one to read only.
                    copy.unlink()
                continue
            (self._own / place).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._own / place, data)
            self._known.add(copy)
            self._kept.add(place)

    def _keep(self) -> None:
        for file in sorted(path for kind in _KEPT for path in self._own.glob(kind) if path.is_file()):
            place = file.relative_to(self._own)
            if place in self._kept or file.suffix in (".tmp", ".lock"):
                continue
            data = file.read_bytes()
            copy = self._copies / f"{place}.{_digest(place, data)}"
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_whole(copy, data)
            except OSError as error:
                log.warning("kernels cannot be written to %s: %s", self._copies, error)
                return
            self._known.add(copy)
            self._kept.add(place)


#: Libraries, choices of an autotuner, and the caches of graphs, whose entries hold kernels of Triton. Triton's own
#: files name others by absolute paths; the source text of libraries is in the functions.
_KEPT = ("*/*.so", "*/*.best_config", "fxgraph/**/*", "aotautograd/**/*")
_DIGEST_SIZE = 16
#: The length of a suffix that is a digest.
_SUFFIX = 1 + 2 * _DIGEST_SIZE


def _digest(place: Path, data: bytes) -> str:
    """A digest of a file and its name: one under the name of another is damaged."""
    return blake2b(data, digest_size=_DIGEST_SIZE, key=blake2b(place.as_posix().encode()).digest()).hexdigest()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
