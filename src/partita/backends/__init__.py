"""Backends: compilers that make a function of a region's body."""

from partita.backends.aot_eager import AotEager
from partita.backends.aot_inductor import AotInductor
from partita.backends.backend import Backend, Compiled
from partita.backends.eager import Eager
from partita.backends.finding import backend_names, find_backend
from partita.backends.inductor import Inductor

__all__ = ["AotEager", "AotInductor", "Backend", "Compiled", "Eager", "Inductor", "backend_names", "find_backend"]
