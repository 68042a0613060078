"""Dissolving modes: a program of plain operators that means the same, without toggles and without mode operators."""

from partita.dissolve.dissolve import dissolve

__all__ = ["dissolve"]
