"""Features: the families of things that a generated program may contain, each on or off."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from partita.errors import OptionError

__all__ = ["ALL", "Features"]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Features:
    """Which families may appear; plain functions of tensors always do."""

    overloads: bool = True
    methods: bool = True
    keywords: bool = True
    modules: bool = True
    attributes: bool = True
    containers: bool = True
    lists: bool = True
    sizes: bool = True
    items: bool = True
    views: bool = True
    writes: bool = True
    random: bool = True
    grad: bool = True
    autocast: bool = True
    inference: bool = True
    checks: bool = True
    unknown: bool = True
    hooks: bool = True
    higher_order: bool = True
    inputs: bool = True
    outputs: bool = True
    pytree: bool = True
    metadata: bool = True
    names: bool = True

    @classmethod
    def only(cls, *names: str) -> Features:
        """The named families and no others."""
        known = [field.name for field in fields(cls)]
        strange = [name for name in names if name not in known]
        if strange:
            raise OptionError(f"no feature is called {', '.join(map(repr, strange))}; there are {', '.join(known)}")
        return cls(**{name: name in names for name in known})

    def has(self, family: str) -> bool:
        """Whether the family may appear."""
        return family == "functions" or bool(getattr(self, family))

    def __repr__(self) -> str:
        off = [field.name for field in fields(self) if not getattr(self, field.name)]
        return f"Features({', '.join(f'{name}=False' for name in off)})"


ALL = Features()
