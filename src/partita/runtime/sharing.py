"""Sharing: equal bodies that are lowered alike have one set of variants in a process, so that each is compiled once."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from weakref import WeakValueDictionary

from partita.runtime.compilation import Compiler
from partita.runtime.variants import Variants

__all__ = ["variants_for"]

#: What lives as long as anyone uses it.
_SHARED: WeakValueDictionary[Hashable, Variants] = WeakValueDictionary()
_LOCK = Lock()


def variants_for(key: Hashable | None, compiler: Compiler, *, keep: int) -> Variants:
    """The variants of all bodies with this key that are lowered alike; new ones for a body without a key."""
    whole = (key, type(compiler), compiler, keep)
    if key is None or not _is_hashable(whole):
        return Variants(compiler, keep=keep)
    with _LOCK:
        found = _SHARED.get(whole)
        if found is None:
            found = _SHARED[whole] = Variants(compiler, keep=keep)
        return found


def _is_hashable(value: object) -> bool:
    """Whether a value has a hash; a backend with a list among its options, say, has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
