"""What policies and treatments are known by in another process, so that caches of compiled code can tell them apart."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType

import torch

from partita._torch.operators import OPERATORS

__all__ = ["identity_of"]


def identity_of(value: object) -> str | None:
    """A text that is the same in every process for what does the same, and no other; None where nobody can tell.

    It can be told of plain values, of operators and functions of torch, and of dataclasses of these, by the files that
    their classes are written in. What else these files import does not count, unless it belongs to Partita.
    """
    if value is None or isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Enum):
        return _joined(type(value).__name__, [_identity_of_class(type(value)), value.name])
    if isinstance(value, OPERATORS):
        return f"operator:{value}"
    if isinstance(value, type):
        return _identity_of_class(value)
    if isinstance(value, FunctionType):
        return _name_in_torch(value)
    if isinstance(value, tuple | list):
        return _joined(type(value).__name__, map(identity_of, value))
    if isinstance(value, set | frozenset):
        held = [identity_of(item) for item in value]
        return None if None in held else _joined("set", sorted(filter(None, held)))
    if isinstance(value, Mapping):
        return _joined("mapping", (identity_of(item) for pair in value.items() for item in pair))
    if is_dataclass(value):
        held = [identity_of(getattr(value, field.name)) for field in fields(value)]
        return _joined(type(value).__name__, [_identity_of_class(type(value)), *held])
    return None


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


_OURS = __name__.partition(".")[0]


def _joined(kind: str, parts: Iterable[str | None]) -> str | None:
    known = list(parts)
    return None if None in known else f"{kind}({','.join(part for part in known if part is not None)})"


def _identity_of_class(cls: type) -> str | None:
    name = f"{cls.__module__}.{cls.__qualname__}"
    top = cls.__module__.partition(".")[0]
    if top in ("torch", "builtins"):
        return name
    if top == _OURS:
        return f"{name}@{_digest_of_partita()}"
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    digest = None if file is None else _digest(Path(file))
    return None if digest is None else f"{name}@{digest}"


def _name_in_torch(function: FunctionType) -> str | None:
    """The name by which a function of torch is found; others may read anything that can change."""
    home = sys.modules.get(function.__module__)
    is_found = getattr(home, function.__name__, None) is function
    return f"{function.__module__}.{function.__name__}" if is_found and _is_of_torch(function) else None


def _is_of_torch(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "torch"


@cache
def _digest_of_partita() -> str:
    """What all of Partita's code comes down to: a policy uses most of it."""
    files = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    return sha256("".join(_digest(file) or "" for file in files).encode()).hexdigest()[:16]


def _digest(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None
