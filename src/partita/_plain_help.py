"""Metaclasses of public classes, so that `help()` shows what a user reads."""

from __future__ import annotations

from collections.abc import Iterable


class PlainHelp(type):
    """Leaves the methods and attributes that a dataclass generates out of `dir()`, which `help()` lists.

    They are what equality, copies and `repr` are made of, and stay attributes as before.
    """

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _GENERATED]


class PublicHelp(PlainHelp):
    """Lists the names in `_PUBLIC` alone, of a class whose other attributes are for Partita's own modules.

    Those are to the class what names outside of `__all__` are to a module.
    """

    _PUBLIC: frozenset[str]

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if name in cls._PUBLIC or name.startswith("__")]


_GENERATED = frozenset(
    (
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__final__", "__match_args__"),
        *("__delattr__", "__setattr__", "__getstate__", "__setstate__", "__init__", "__post_init__"),
        *("__eq__", "__hash__", "__repr__", "__weakref__"),
    )
)
