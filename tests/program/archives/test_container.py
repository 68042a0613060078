"""Paths that lead to no file, and zip directories that no archive has, are refused in one line before they are read."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

import pytest

from partita.errors import ArchiveError
from partita.program.archives import inspect_archive, load_exported
from partita.program.archives.container import MOST_DIRECTORY_BYTES

LOOKS = (load_exported, inspect_archive)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_a_socket_and_a_link_to_itself_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        for look in LOOKS:
            with pytest.raises(ArchiveError, match="socket is a pipe, a socket or a device"):
                look("socket")
    os.symlink("link", "link")
    for look in LOOKS:
        with pytest.raises(ArchiveError, match=r"there is no file link: .*symbolic link"):
            look("link")


@pytest.mark.parametrize("name", ["a" * 300, "m.pt2/inside", "half\ud800"])
def test_a_path_that_no_file_has_is_refused_in_words(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"")
    for look in LOOKS:
        with pytest.raises(ArchiveError, match="there is no file"):
            look(tmp_path / name)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such names")
@pytest.mark.parametrize("name", ["two\nlines.pt2", "\x1b[31mred.pt2", "to the left\u202e.pt2"])
def test_a_file_name_does_not_reach_the_terminal_as_it_is(name: str, tmp_path: Path) -> None:
    for content in (None, b"no archive"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        for look in LOOKS:
            with pytest.raises(ArchiveError) as caught:
                look(tmp_path / name)
            assert str(caught.value).isprintable()


@pytest.mark.parametrize("size", [MOST_DIRECTORY_BYTES + 1, 1 << 40])
def test_a_directory_larger_than_any_archive_has_is_not_read(size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with open(path, "wb") as file:
        try:
            file.truncate(size)  # A hole, which takes no space.
        except OSError:
            pytest.skip("the disk has no files of such a size")
        file.seek(size)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, 0))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, size, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    for look in LOOKS:
        with pytest.raises(ArchiveError, match=f"it has a directory of {size} bytes, which no archive has"):
            look(path)
