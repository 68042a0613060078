"""Every Python example and every command of the documentation runs, and prints what the page says.

The ```python blocks of one file share a namespace, in order. A block under a line `<!-- not run -->` is left out. A
```text block under a line `<!-- prints -->` is what the Python block above it prints. A ```console block has commands,
`$ partita ...`, each with what it prints below. `python -m tests.test_documentation` writes what is printed anew.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
import torch
from tests.helpers.torch_versions import NEEDS_SPLIT_MODULE_SIMPLE

from partita.backends import backend
from partita_cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "<!-- not run -->"
PRINTS = "<!-- prints -->"

_NEEDS_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
_FENCE = re.compile(r" *(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _needs(page: Path) -> list[pytest.MarkDecorator]:
    """What a page compares with, or takes its model from, must be there."""
    needs = {
        "switch-from-split-module": [NEEDS_SPLIT_MODULE_SIMPLE],
        "recompute": [_NEEDS_TRANSFORMERS],
        "serve-a-model": [_NEEDS_TRANSFORMERS, pytest.mark.slow],  # It compiles five bodies with Inductor.
    }
    return needs.get(page.stem, [])


@dataclass(frozen=True, slots=True)
class Block:
    """The code of one fenced block, the line of the page on which it begins, and what it prints, if the page says."""

    line: int
    code: str
    prints: str | None = None
    language: str = "python"


@pytest.mark.parametrize("page", [pytest.param(page, marks=_needs(page), id=_name(page)) for page in PAGES])
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "_REGISTERED", {})
    # Commands import modules of the page from its folder.
    monkeypatch.setattr(sys, "path", [*sys.path])
    namespace = _fresh_namespace(page, monkeypatch)
    for block in python_blocks(page.read_text(encoding="utf-8")):
        run(block, page, namespace)
    for name in [name for name, module in sys.modules.items() if _is_below(module, tmp_path)]:
        del sys.modules[name]


def test_only_python_blocks_that_are_not_excused_are_taken() -> None:
    text = textwrap.dedent(
        """\
        ```python
        a = 1
        ```
        ```sh
        make test
        ```
        <!-- not run -->

        ```python
        b = 2
        ```
        - in a list:
          ```python
          c = 3

          d = 4
          ```
        ````text
        ```python
        e = 5
        ```
        ````
        """
    )
    assert list(python_blocks(text)) == [Block(2, "a = 1"), Block(14, "c = 3\n\nd = 4")]


def test_a_page_tells_what_an_example_prints() -> None:
    text = f"```python\nprint(1)\n```\nThat prints:\n\n{PRINTS}\n```text\n1\n```\n```text\nnothing\n```\n"
    [block] = python_blocks(text)
    assert block == Block(2, "print(1)", "1")
    run(block, ROOT / "page.md", {})
    with pytest.raises(AssertionError, match="line 2"):
        run(replace(block, prints="2"), ROOT / "page.md", {})


def test_commands_run_and_print_what_the_page_says() -> None:
    text = "```console\n$ partita --version\npartita 0\n```\n<!-- not run -->\n```console\n$ partita demo\n```\n"
    [block] = python_blocks(text)
    with pytest.raises(AssertionError, match="line 2 prints"):
        run(block, ROOT / "page.md", {})
    printed = run(replace(block, prints=None), ROOT / "page.md", {})
    assert printed.startswith("$ partita --version\npartita ")


def test_an_unclosed_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2 is never closed"):
        list(python_blocks("text\n```python\na = 1\n"))


def test_a_failing_example_names_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\nraise RuntimeError('broken')\n```\n")
    [block] = python_blocks(page.read_text())
    with pytest.raises(RuntimeError, match="broken") as caught:
        run(block, page, {})
    innermost = caught.traceback[-1]
    assert (str(innermost.path), innermost.lineno + 1) == (str(page), 5)


def python_blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page that are to be run, in order, each with what it is said to print."""
    waiting: Block | None = None
    for block, info, remark in _fenced_blocks(text):
        if info == "text" and remark == PRINTS and waiting is not None:
            waiting = replace(waiting, prints=block.code.strip())
        elif info in ("python", "console") and remark != NOT_RUN:
            if waiting is not None:
                yield waiting
            waiting = replace(block, language=info, prints=block.code if info == "console" else None)
    if waiting is not None:
        yield waiting


def run(block: Block, page: Path, namespace: dict[str, object]) -> str:
    """Runs a block in `namespace`, checks what it prints and gives that back; its traceback points into the page."""
    if block.language == "console":
        return _run_commands(block, page)
    padding = "\n" * (block.line - 1)
    code = compile(padding + block.code, str(page), "exec", dont_inherit=True)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, namespace)
    found = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    if block.prints not in (None, found):
        raise AssertionError(f"{page}: the block on line {block.line} prints\n{found}\nand not\n{block.prints}")
    return found


def _run_commands(block: Block, page: Path) -> str:
    """Runs the commands of a block; gives them back, each with what it prints."""
    found = []
    for command in (line for line in block.code.splitlines() if line.startswith("$ ")):
        name, *words = shlex.split(command.removeprefix("$ "), comments=True)
        assert name == "partita", f"{page}: only partita is run, not {command}"
        printed = StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            main(words)
        found += [command, *(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())]
    text = "\n".join(found)
    if block.prints not in (None, text):
        raise AssertionError(f"{page}: the block on line {block.line} prints\n{text}\nand not\n{block.prints}")
    return text


def _fenced_blocks(text: str) -> Iterator[tuple[Block, str, str]]:
    """Every fenced block with the first word of its information and the nearest text above it."""
    lines = text.splitlines()
    numbered = iter(enumerate(lines))
    for number, line in numbered:
        opening = _FENCE.fullmatch(line)
        if opening is None:
            continue
        body = _body(numbered, opening["ticks"], number)
        remark = next((above.strip() for above in reversed(lines[:number]) if above.strip()), "")
        info = next(iter(opening["info"].split()), "")
        yield Block(line=number + 2, code=textwrap.dedent("\n".join(body))), info, remark


def _body(numbered: Iterator[tuple[int, str]], ticks: str, opened_at: int) -> list[str]:
    body = []
    for _, line in numbered:
        stripped = line.strip()
        if stripped.startswith(ticks) and not stripped.strip(ticks[0]):
            return body
        body.append(line)
    raise ValueError(f"the block that opens on line {opened_at + 1} is never closed")


def _is_below(module: object, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(str(folder))


def _fresh_namespace(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    # A real module, since dataclasses and pickle look their classes up by module name.
    module = ModuleType(re.sub(r"\W", "_", page.relative_to(ROOT).as_posix()))
    module.__file__ = str(page)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__dict__


def _written_anew(page: Path, namespace: dict[str, object]) -> str:
    """The page with what its examples print in every block that tells it."""
    text = page.read_text(encoding="utf-8")
    lines, edits, printed = text.splitlines(), [], ""
    for block, info, remark in _fenced_blocks(text):
        if info == "python" and remark != NOT_RUN:
            printed = run(block, page, namespace)
        elif info == "console" and remark != NOT_RUN:
            lines_of_block = (block.line - 1, block.line - 1 + len(block.code.splitlines()))
            edits.append((*lines_of_block, run(replace(block, language=info), page, namespace).splitlines()))
        elif info == "text" and remark == PRINTS:
            first = block.line - 1
            edits.append((first, first + len(block.code.splitlines()), printed.splitlines()))
    for first, last, printed_lines in reversed(edits):
        lines[first:last] = printed_lines
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
            patch.chdir(folder)  # Examples write files.
            torch.manual_seed(0)
            page.write_text(_written_anew(page, _fresh_namespace(page, patch)), encoding="utf-8")
