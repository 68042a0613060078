"""Looking up a full name among the modules that have been imported, without importing any."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def imported(full_name: str) -> Any:
    """The class or function of that name, or None where no imported module has it."""
    found = _found(full_name)
    if type(found) is staticmethod:
        found = found.__func__  # What graphs have as the target of a call.
    return found if callable(found) else None


def imported_class(full_name: str) -> type | None:
    """The class of that name, or None where no imported module has it."""
    found = _found(full_name)
    return found if issubclass(type(found), type) else None


def _found(full_name: str) -> Any:
    """What a module, or a class in it, has under that name; None if nothing.

    Attribute access may run code, lazy modules import others then, and the name may come from a file: so only the
    dictionaries of modules and classes are read.
    """
    if len(full_name) > _LONGEST:
        return None
    module, names = _module_and_names(full_name)
    found: Any = sys.modules.get(module)
    for name in names:
        if issubclass(type(found), ModuleType):
            holders = [object.__getattribute__(found, "__dict__")]
        elif issubclass(type(found), type):
            holders = [type.__getattribute__(each, "__dict__") for each in type.__getattribute__(found, "__mro__")]
        else:
            return None
        found = next((holder[name] for holder in holders if name in holder), None)
    return found if names else None


#: How long a name may be: looking it up takes time that grows with the square of its length.
_LONGEST = 1000


def _module_and_names(full_name: str) -> tuple[str, list[str]]:
    """The imported module with the longest name, and the names to follow from there."""
    module, _, name = full_name.rpartition(".")
    names = [name]
    while module and module not in sys.modules:
        module, _, name = module.rpartition(".")
        names.append(name)
    return module, names[::-1]
