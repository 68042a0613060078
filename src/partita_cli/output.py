"""What commands print and write: text for people, JSON for machines, progress on a terminal, files that are whole."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from partita_cli.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST_LINE = 1_000


def say(text: str = "", *, style: str | None = None) -> None:
    """Prints text, as it is; control characters, which a file from others may have in its names, are replaced."""
    if style is None:
        _write(f"{_printable(text)}\n")
    else:
        _print(_console(), text, style=style)


def say_json(data: object) -> None:
    """Prints data as JSON."""
    _write(json.dumps(data, indent=1) + "\n")


def title(text: str) -> None:
    """Prints a heading."""
    say(text, style="bold")


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), *, indent: str = "") -> None:
    """Prints rows in columns; on a terminal, the last one is wrapped where it would be too wide."""
    cells = [[str(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    if not cells:
        return
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    before = len(indent) + sum(widths[:-1]) + 2 * (len(widths) - 1)
    width = get_terminal_size().columns - before if sys.stdout.isatty() else 0
    for at, row in enumerate(cells):
        start = indent + "".join(f"{cell:{width}}  " for cell, width in zip(row[:-1], widths[:-1], strict=True))
        lines = wrap(row[-1], width) if width >= 20 else [row[-1]]
        for number, line in enumerate(lines or [""]):
            text = f"{start if not number else ' ' * len(start)}{line}".rstrip()
            say(text, style="bold" if head and not at else None)


def say_rows(text: str, rows: int) -> None:
    """Prints text whose first `rows` lines are a table, of which a narrow terminal shows the beginning."""
    width = get_terminal_size().columns if sys.stdout.isatty() else 0
    lines = text.splitlines()
    is_cut = bool(width) and any(len(line) > width for line in lines[:rows])
    for number, line in enumerate(lines):
        say(f"{line[: width - 1]}…" if is_cut and number < rows and len(line) > width else line)
    if is_cut:
        remark(f"cut at {width} columns: | less -S shows all of it, --json has it as data")


def complain(text: str) -> None:
    """Prints one line about what is wrong on stderr."""
    _print(_console(stderr=True), f"partita: {text}", style="red")


def remark(text: str) -> None:
    """Prints a line beside the result on stderr: where a file was written, say."""
    _print(_console(stderr=True), text)


def one_line(text: str) -> str:
    """The first line of a message, and that there is more, if there is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no more is known"]
    first = lines[0] if len(lines[0]) <= _LONGEST_LINE else f"{lines[0][:_LONGEST_LINE]}..."
    return first if len(lines) == 1 else f"{first} (--debug shows all of it)"


@contextmanager
def working(on: str) -> Iterator[None]:
    """Says on a terminal what takes its time."""
    if not sys.stderr.isatty():  # Scripts do without rich, whose import takes a while.
        yield
        return
    from rich.text import Text

    console = _console(stderr=True)
    # Of a string, rich would read the brackets of a path as markup.
    with console.status(Text(f"{_printable(on)} ...")) if console.is_terminal else nullcontext():
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Holds back what libraries print on stderr: after an error they say in pages what we say in a line.

    The error carries it as a note, which the traceback of `--debug` ends with.
    """
    logger = logging.getLogger("torch")
    level, kept = logger.level, StringIO()
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(kept):
            yield
    except Exception as error:
        if text := kept.getvalue().rstrip():
            error.add_note(f"Printed before that:\n{text}")
        raise
    finally:
        logger.setLevel(level)
    sys.stderr.write(kept.getvalue())


def check_output(path: Path | None, *suffixes: str, inputs: Iterable[Path | None] = ()) -> None:
    """Raises where a file cannot be written, before anything else is done; `suffixes` are the kinds it may have.

    What the command reads, its `inputs`, is not replaced.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise CommandError(f"{path} should end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the name of a file in it")
    if path.exists() and any(one is not None and one.exists() and one.samefile(path) for one in inputs):
        raise CommandError(f"{path} is what the command reads, and would be replaced; give another name")
    if not path.parent.is_dir():
        raise CommandError(f"{path} cannot be written: there is no folder {path.parent}")
    from tempfile import NamedTemporaryFile  # Help starts without it.

    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; the file takes its place at `path` when it is complete, and is removed after an error."""
    from partita.whole_files import whole_file  # With it comes torch.

    with whole_file(path) as draft:
        yield draft


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: 1 node, 2 nodes."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def plain_data(value: Any) -> Any:
    """A value as JSON has it: text for what it has not."""
    if isinstance(value, dict):
        return {str(key): plain_data(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def flush() -> None:
    """Writes what is left to stdout."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """Goes on without stdout: whoever read it has seen enough, `head` say, but the command does all it was asked to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(console: Console, text: str, *, style: str | None = None) -> None:
    """Prints text on a console as it is: brackets are no markup, and a name between colons is no emoji."""
    console.print(_printable(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            _drop_output()  # The default leaves the program with status 1.

    # The stream of now: what is printed later may be held back.
    return Lasting(file=sys.stderr if stderr else sys.stdout)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)
