"""The examples in docstrings of public names run; they are the paragraphs that are indented below `Example::`."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import get_origin

import pytest
import torch
from tests.test_public_surface import PUBLIC

import partita

#: What most users call, so `help()` shows how.
MOST_USED = {
    "partita": {"Plan", "Program", "bisect", "capture", "compare", "fit", "plan", "verify"},
    "partita.policies": {"ByCapability", "ByModule"},
    "partita.treatments": {"Lower", "Recompute"},
}

_EXAMPLE = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)+)", re.MULTILINE)


def _examples() -> dict[str, str]:
    """The example of each public name that has one, by its name."""
    found: dict[str, str] = {}
    seen = set()
    for module_name, names in PUBLIC.items():
        module = importlib.import_module(module_name)
        for name in sorted(names):
            value = getattr(module, name)
            code = None if get_origin(value) else example_in(inspect.getdoc(value) or "")
            if code is not None and id(value) not in seen:
                seen.add(id(value))
                found[f"{module_name}.{name}"] = code
    return found


def example_in(docstring: str) -> str | None:
    """The code of the first example, if there is one."""
    found = _EXAMPLE.search(docstring + "\n")
    return None if found is None else textwrap.dedent(found[1]).rstrip()


@pytest.mark.parametrize("name", _examples())
def test_examples_run_after_that_of_the_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    package = example_in(inspect.getdoc(partita) or "")
    assert package is not None
    for title, code in (("partita", package), (name, _examples()[name])):
        exec(compile(code, f"<example of {title}>", "exec", dont_inherit=True), namespace)


def test_what_most_users_call_has_an_example() -> None:
    names = {f"{module}.{name}" for module, used in MOST_USED.items() for name in used}
    assert names <= set(_examples())


def test_an_example_ends_where_the_indentation_does() -> None:
    docstring = "A line.\n\nExample::\n\n    a = 1\n\n    if a:\n        b = 2\n\nMore text:\n\n    no code\n"
    assert example_in(docstring) == "a = 1\n\nif a:\n    b = 2"
    assert example_in("A line.\n\n    no code\n") is None
