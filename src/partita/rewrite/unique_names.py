"""Names for new submodules that collide with nothing a module already has."""

from __future__ import annotations

import keyword
from collections.abc import Iterable

from torch import nn

from partita._torch.names import ADDED_BY_EXPORT, identifier

__all__ = ["unique_names"]


def unique_names(wanted: Iterable[str], root: nn.Module) -> tuple[str, ...]:
    """The wanted names as identifiers, numbered where `root` or another of them has that name."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    names = []
    for name in wanted:
        base = identifier(name) or "region"
        base = f"region_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
        count = counts.get(base, 0)
        chosen = f"{base}_{count}" if count else base
        while chosen in taken or chosen in ADDED_BY_EXPORT or hasattr(root, chosen):
            count += 1
            chosen = f"{base}_{count}"
        counts[base] = count
        taken.add(chosen)
        names.append(chosen)
    return tuple(names)
