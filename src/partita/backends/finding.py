"""Backends by name: ours are found as anyone else's are, through entry points."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from partita.backends.backend import Backend, is_backend
from partita.errors import OptionError

__all__ = ["backend_names", "find_backend"]

_GROUP = "partita.backends"


def find_backend(wanted: str | Backend) -> Backend:
    """The backend of that name, with its default options; a backend itself is given back."""
    if is_backend(wanted):
        return wanted
    if not isinstance(wanted, str):
        raise OptionError(f"a backend is a name or has `name`, `refusal` and `compile`; {wanted!r} is neither")
    found = _entries().get(wanted)
    if found is None:
        names = backend_names()
        near = get_close_matches(wanted, names, n=3) or names
        raise OptionError(f"no backend is called {wanted!r}; try {', '.join(map(repr, near))}")
    try:
        made = found.load()()
    except Exception as error:
        raise OptionError(f"backend {wanted!r} cannot be had: {found.value} raised {error}") from error
    if not is_backend(made):
        raise OptionError(f"{found.value}, the entry point of backend {wanted!r}, makes {made!r}, which is no backend")
    return made


def backend_names() -> list[str]:
    """The names of all backends that are installed."""
    return sorted(_entries())


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}
