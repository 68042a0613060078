"""Rewriting: the only code that builds or changes graphs."""

from partita.rewrite.inline import inline
from partita.rewrite.outline import gather, outline

__all__ = ["gather", "inline", "outline"]
