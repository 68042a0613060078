"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; the file takes its place at `path` when it is complete, and is removed after an error.

    It is in the same folder and has the same suffix, by which writers choose a format.
    """
    place = Path(path)
    draft = place.with_name(f".{place.stem}.{os.getpid()}.{token_hex(4)}{place.suffix}")
    try:
        yield draft
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a concurrent reader finds all of it or nothing; what is unfinished ends in .tmp."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
