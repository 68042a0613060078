"""Kernels in a cache folder: what is damaged there is built again, and never loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from partita.lowering.kernel_files import KernelFiles, kernel_files

_NAME = Path("ab", "cabc.main.so")


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "temporary"))


def _process(folder: Path) -> KernelFiles:
    """What another process has."""
    return KernelFiles(folder / "kernels", os.getpid())


def _build(files: KernelFiles, *, name: Path = _NAME, data: bytes = b"library") -> bool:
    """Uses a library as Inductor does, which builds what is not there; whether it was built."""
    with files.used():
        library = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / name
        is_new = not library.exists()
        if is_new:
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(data)
        assert library.read_bytes() == data
    return is_new


def _copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_next_process_builds_nothing(tmp_path: Path) -> None:
    assert [_build(_process(tmp_path / "cache")) for _ in range(3)] == [True, False, False]
    assert len(_copies(tmp_path / "cache")) == 1


def test_a_process_builds_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """What is half written is there, where no other process looks."""
    before, folder = os.environ["TORCHINDUCTOR_CACHE_DIR"], tmp_path / "cache"
    one, other = _process(folder), _process(folder)
    with one.used():
        own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (own / "ab").mkdir()
        (own / _NAME).write_bytes(b"libr")
        with other.used():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(own)
        assert not _copies(folder)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before
    assert "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:3], lambda data: b"", lambda data: data + b"x", lambda data: b"x" + data[1:]]
)
def test_a_damaged_library_is_a_message_and_built_again(
    tmp_path: Path, spoil: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _build(_process(tmp_path / "cache"))
    (copy,) = _copies(tmp_path / "cache")
    copy.write_bytes(spoil(copy.read_bytes()))
    with caplog.at_level(logging.WARNING, "partita"):
        assert _build(_process(tmp_path / "cache"))
    assert f"{copy} is damaged, so it is removed and built again" in caplog.text
    assert not _build(_process(tmp_path / "cache"))


def test_a_library_under_the_name_of_another_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = (_NAME, _NAME.with_name("other.so"))
    for name in names:
        _build(_process(tmp_path / "cache"), name=name, data=str(name).encode())
    one, other = _copies(tmp_path / "cache")
    one.rename(one.with_name(f"other.so{one.suffix}"))
    other.unlink()
    assert all(_build(_process(tmp_path / "cache"), name=name, data=str(name).encode()) for name in names)
    assert caplog.text.count("is damaged") == 1


def test_a_damaged_library_that_cannot_be_removed_is_not_used(tmp_path: Path) -> None:
    _build(_process(tmp_path / "cache"))
    (copy,) = _copies(tmp_path / "cache")
    copy.write_bytes(b"")
    with patch.object(Path, "unlink", side_effect=PermissionError("read only")):
        assert _build(_process(tmp_path / "cache"))


def test_entries_of_caches_are_kept_and_what_torch_has_not_finished_is_not(tmp_path: Path) -> None:
    entry = Path("aotautograd", "akey", "dcba")
    assert [_build(_process(tmp_path / "cache"), name=entry) for _ in range(2)] == [True, False]
    for name in (".1.2.tmp", "dcba.lock"):
        assert _build(_process(tmp_path / "cache"), name=entry.with_name(name))
    assert len(_copies(tmp_path / "cache")) == 1


def test_drafts_are_no_libraries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _build(_process(tmp_path / "cache"))
    (copy,) = _copies(tmp_path / "cache")
    copy.rename(copy.with_name("tmpabc.tmp"))
    assert _build(_process(tmp_path / "cache"))
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = _process(tmp_path / "cache")
    _build(files)
    with patch("os.replace", side_effect=OSError("no space left")):
        assert _build(files, name=_NAME.with_name("other.so"))
    assert "kernels cannot be written" in caplog.text
    assert len(_copies(tmp_path / "cache")) == 1


def test_a_fork_has_a_folder_of_its_own(tmp_path: Path) -> None:
    ours = kernel_files(tmp_path)
    assert kernel_files(tmp_path) is ours
    with patch("os.getpid", return_value=os.getpid() + 1):
        assert kernel_files(tmp_path) is not ours
