"""Texts in a saved program that end up in generated Python code: what each may look like."""

from __future__ import annotations

import keyword
from collections.abc import Callable

from partita.graphs.archives.expression_names import PLAIN_TEXT

__all__ = ["Fault", "free_fault", "literal_fault", "module_stack_fault", "name_fault", "path_fault"]

#: What is wrong with a text, or None.
Fault = Callable[[str], str | None]


def name_fault(text: str) -> str | None:
    """For names of nodes, inputs and keywords, which become variables."""
    return None if not text or (text.isidentifier() and not keyword.iskeyword(text)) else "it is no name of Python"


def path_fault(text: str) -> str | None:
    """For dotted names of parameters and modules, which code reads by `getattr` where they are no names of Python."""
    if not literal_fault(text) and (not text or all(part and not part.startswith("__") for part in text.split("."))):
        return None
    return "it is no path of a module or tensor"


def literal_fault(text: str) -> str | None:
    """For texts that are written between quotes."""
    return None if PLAIN_TEXT.fullmatch(text) else "it has quotes or other signs that would end a string"


def module_stack_fault(text: str) -> str | None:
    """For the modules that a node came from, which become modules again when a program is unflattened."""
    return literal_fault(text.replace("L['self']", ""))


def free_fault(text: str) -> None:
    """For texts that are shown, stored or compared, and never become code."""
