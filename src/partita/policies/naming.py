"""Names for regions: identifiers, each of them different."""

from __future__ import annotations

from collections.abc import Iterable

from partita._torch.names import identifier

__all__ = ["distinct_names"]


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """The wanted names as identifiers, numbered where an earlier one is the same."""
    taken: set[str] = set()
    repeats: dict[str, int] = {}
    names = []
    for text in wanted:
        base = name = _identifier(text)
        while name in taken:
            repeats[base] = repeats.get(base, 0) + 1
            name = f"{base}_{repeats[base]}"
        taken.add(name)
        names.append(name)
    return names


def _identifier(text: str) -> str:
    name = identifier(text)
    return name if name and not name[0].isdigit() else f"part_{name}"
