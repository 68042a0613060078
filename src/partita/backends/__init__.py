"""Backends: compilers that make a function of a region's body."""

from partita.backends.backend import Backend, Compiled, Eager, backend_names, find_backend, register_backend
from partita.backends.inductor import AotEager, AotInductor, Inductor

__all__ = [
    "AotEager",
    "AotInductor",
    "Backend",
    "Compiled",
    "Eager",
    "Inductor",
    "backend_names",
    "find_backend",
    "register_backend",
]
