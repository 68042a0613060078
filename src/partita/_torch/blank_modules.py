"""Modules with nothing in them, made without the set-up of `nn.Module`, which costs more than all else about a part."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["blank_attributes", "blank_module"]


def blank_module(*, training: bool) -> nn.Module:
    """What `nn.Module()` gives."""
    module = nn.Module.__new__(nn.Module)
    module.__dict__.update(blank_attributes(), training=training)
    return module


def blank_attributes() -> dict[str, Any]:
    """The attributes of a fresh module, in tables of its own."""
    return {name: value.copy() if name in _TABLES else value for name, value in _TEMPLATE.items()}


_TEMPLATE = dict(nn.Module().__dict__)
_TABLES = frozenset(name for name, value in _TEMPLATE.items() if hasattr(value, "copy"))
