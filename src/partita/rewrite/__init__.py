"""Rewriting: the only code that builds graphs from graphs."""

from partita.rewrite.dissolve import dissolve
from partita.rewrite.gather import gather
from partita.rewrite.inline import inline
from partita.rewrite.outline import outline

__all__ = ["dissolve", "gather", "inline", "outline"]
