"""Looking up a full name among the modules that have been imported, without importing any."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def imported(full_name: str) -> Any:
    """The class or function of that name, or None where no imported module has it.

    Attribute access may run code, so the name must come from the user, never from a file.
    """
    module, names = _module_and_names(full_name)
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found if callable(found) else None


def imported_class(full_name: str) -> type | None:
    """The class of that name, or None where no imported module has it; the lookup runs no code."""
    module, names = _module_and_names(full_name)
    found: Any = sys.modules.get(module)
    # `vars` and `isinstance` access attributes of the object, and lazy modules load on attribute access.
    held = object.__getattribute__(found, "__dict__") if issubclass(type(found), ModuleType) else {}
    for name in names:
        found = held.get(name)
        if not issubclass(type(found), type):
            return None
        held = type.__getattribute__(found, "__dict__")
    return found if names else None


def _module_and_names(full_name: str) -> tuple[str, list[str]]:
    """The imported module with the longest name, and the names to follow from there."""
    module, _, name = full_name.rpartition(".")
    names = [name]
    while module and module not in sys.modules:
        module, _, name = module.rpartition(".")
        names.append(name)
    return module, names[::-1]
