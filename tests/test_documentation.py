"""Every Python example of the documentation runs.

The ```python blocks of one file share a namespace, in order. A block under a line `<!-- not run -->` is left out.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "<!-- not run -->"

_FENCE = re.compile(r" *(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)")


@dataclass(frozen=True, slots=True)
class Block:
    """The code of one fenced block and the line of the page on which that code begins."""

    line: int
    code: str


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = _fresh_namespace(page, monkeypatch)
    for block in python_blocks(page.read_text(encoding="utf-8")):
        run(block, page, namespace)


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
    """The Python blocks of a page that are to be run, in order."""
    lines = text.splitlines()
    numbered = iter(enumerate(lines))
    for number, line in numbered:
        opening = _FENCE.fullmatch(line)
        if opening is None:
            continue
        body = _body(numbered, opening["ticks"], number)
        if opening["info"].split()[:1] == ["python"] and not _is_excused(lines[:number]):
            yield Block(line=number + 2, code=textwrap.dedent("\n".join(body)))


def run(block: Block, page: Path, namespace: dict[str, object]) -> None:
    """Runs a block in `namespace`; its traceback points into the page."""
    padding = "\n" * (block.line - 1)
    code = compile(padding + block.code, str(page), "exec", dont_inherit=True)
    exec(code, namespace)


def _body(numbered: Iterator[tuple[int, str]], ticks: str, opened_at: int) -> list[str]:
    body = []
    for _, line in numbered:
        stripped = line.strip()
        if stripped.startswith(ticks) and not stripped.strip(ticks[0]):
            return body
        body.append(line)
    raise ValueError(f"the block that opens on line {opened_at + 1} is never closed")


def _is_excused(lines_above: list[str]) -> bool:
    return next((line.strip() for line in reversed(lines_above) if line.strip()), "") == NOT_RUN


def _fresh_namespace(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    # A real module, since dataclasses and pickle look their classes up by module name.
    module = ModuleType(re.sub(r"\W", "_", page.relative_to(ROOT).as_posix()))
    module.__file__ = str(page)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__dict__
