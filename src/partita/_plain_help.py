"""Metaclasses of public classes, so that `help()` shows what a user reads."""

from __future__ import annotations

from collections.abc import Iterable


class PlainHelp(type):
    """Leaves the methods and attributes that a dataclass generates out of `dir()`, which `help()` lists.

    They are what equality, copies and `repr` are made of, and stay attributes as before.
    """

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _GENERATED]


_GENERATED = frozenset(
    (
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__final__", "__match_args__"),
        *("__delattr__", "__setattr__", "__getstate__", "__setstate__", "__init__", "__post_init__"),
        *("__eq__", "__hash__", "__repr__", "__weakref__"),
    )
)
