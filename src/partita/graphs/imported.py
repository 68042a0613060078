"""Looking up a full name among the modules that have been imported, without importing any."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["imported"]


def imported(full_name: str) -> Any:
    """The class or function of that name, or None where no imported module has it."""
    module, _, name = full_name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        name = f"{outer}.{name}"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else None
