"""Backends: compilers that make a function of a region's body."""

from partita.backends.backend import Backend, Compiled
from partita.backends.finding import backend_names, find_backend

__all__ = ["Backend", "Compiled", "backend_names", "find_backend"]
