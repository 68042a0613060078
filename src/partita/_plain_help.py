"""Metaclasses of public classes, so that `help()` shows what a user reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import getsource


class PlainHelp(type):
    """Leaves the methods and attributes that a dataclass generates out of `dir()`, which `help()` lists.

    They are what equality, copies and `repr` are made of, and stay attributes as before.
    """

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _GENERATED]


def _described_fields(cls: type) -> Iterator[tuple[str, str]]:
    """The fields of a class with slots: type, default and the comment above, so far as its source is there."""
    own = cls.__dict__.get("__slots__", ())
    try:
        lines = getsource(cls).splitlines()
    except (OSError, TypeError):
        lines = []
    comments: list[str] = []
    found = dict.fromkeys(own, "")
    for line in lines:
        if match := re.match(r"    #: (.*)", line):
            comments.append(match[1])
            continue
        if (match := re.match(r"    (\w+): (.+)", line)) and match[1] in found:
            found[match[1]] = "\n".join([match[2].partition(" = field(")[0], *comments])
        comments = []
    yield from found.items()


# `help()` reads a mapping of slots for what to say of each field. Those of a class are found beside it: in its own
# body, the name would be that of the metaclass' slots.
PlainHelp.__slots__ = property(lambda cls: dict(_described_fields(cls)))  # type: ignore[attr-defined]


_GENERATED = frozenset(
    (
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__final__", "__match_args__"),
        *("__delattr__", "__setattr__", "__getstate__", "__setstate__", "__init__", "__post_init__"),
        *("__eq__", "__hash__", "__repr__", "__weakref__"),
    )
)
