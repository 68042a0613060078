"""What commands print and write is whole, plain where nobody looks, and safe to print."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from partita_cli import output
from partita_cli.errors import CommandError


def _fail_after(write: Callable[[str], object], text: str) -> None:
    write(text)
    raise ZeroDivisionError


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    place = tmp_path / "model.pt2"
    place.write_text("old")
    with pytest.raises(ZeroDivisionError), output.whole_file(place) as draft:
        _fail_after(draft.write_text, "half")
    assert (place.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)
    with output.whole_file(place) as draft:
        draft.write_text("new")
        assert draft.suffix == ".pt2"
    assert (place.read_text(), len(list(tmp_path.iterdir()))) == ("new", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CommandError, match="Permission denied"):
        output.check_output(tmp_path / "model.pt2")


def test_control_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("name\x1b[31m\x07\nnext")
    assert capsys.readouterr().out == "name\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}\nnext\n"


@pytest.mark.parametrize("name", ["m[red].pt2", "m[/red].pt2", "a:smile:b.pt2"])
def test_a_name_is_neither_markup_nor_emoji(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.say(name)
    output.say(name, style="bold")
    output.complain(name)
    output.remark(name)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{name}\n{name}\n", f"partita: {name}\n{name}\n")


@pytest.mark.parametrize("name", ["m[red].pt2", "m[/red].pt2", "a:smile:b.pt2"])
def test_progress_shows_a_name_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    console = Console(file=terminal, force_terminal=True, width=80)
    monkeypatch.setattr(output, "_console", lambda **_: console)
    with output.working(name):
        pass
    assert f"{name} ..." in terminal.getvalue()


def test_columns_are_aligned_and_wrapped_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", "word " * 30), ("longer", "short")]
    output.table(rows, ("name", "text"))
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [12, 157, 13]
    monkeypatch.setenv("COLUMNS", "40")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    output.table(rows)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("        word")


def test_a_table_is_cut_on_a_narrow_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{'a' * 50}\nshort\n{'remark ' * 10}"
    output.say_rows(text, rows=2)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", "40")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    output.say_rows(text, rows=2)
    assert terminal.getvalue().splitlines() == [f"{'a' * 39}…", "short", "remark " * 10]
    assert "cut at 40 columns" in capsys.readouterr().err


def test_what_libraries_print_is_shown_after_success_only(capsys: pytest.CaptureFixture[str]) -> None:
    with output.held_back():
        print("a warning", file=sys.stderr)
    assert capsys.readouterr().err == "a warning\n"
    with pytest.raises(ZeroDivisionError), output.held_back():
        _fail_after(sys.stderr.write, "pages")
    assert capsys.readouterr().err == ""


def test_what_libraries_print_before_an_error_is_a_note_of_it() -> None:
    with pytest.raises(ZeroDivisionError) as caught, output.held_back():
        _fail_after(sys.stderr.write, "pages")
    assert caught.value.__notes__ == ["Printed before that:\npages"]


_SHOWN = """
from partita_cli.output import complain, say, title, working
title("head")
with working("on it"):
    pass
complain("wrong")
"""


def _on_a_terminal(environment: dict[str, str]) -> str:
    """What is seen on a terminal."""
    leader, follower = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", _SHOWN], stdout=follower, stderr=follower, check=True, env={**os.environ, **environment}
    )
    os.close(follower)
    seen = os.read(leader, 10_000).decode()
    os.close(leader)
    return seen


def test_colours_and_progress_are_for_terminals() -> None:
    seen = _on_a_terminal({"TERM": "xterm-256color", "COLUMNS": "80"})
    assert "\x1b[1mhead" in seen
    assert "on it" in seen
    assert "\x1b[31mpartita: wrong" in seen
    plain = _on_a_terminal({"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "1"})
    assert "\x1b[31m" not in plain
    piped = subprocess.run([sys.executable, "-c", _SHOWN], capture_output=True, text=True, check=True)
    assert (piped.stdout, piped.stderr) == ("head\n", "partita: wrong\n")
