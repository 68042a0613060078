"""Rewriting: the only code that builds graphs from graphs."""

from partita.dissolve.dissolve import dissolve
from partita.rewrite.inline import inline
from partita.rewrite.outline import gather, outline

__all__ = ["dissolve", "gather", "inline", "outline"]
