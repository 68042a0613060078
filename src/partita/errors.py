"""Every error that Partita raises: what is wrong, with which names, and what would fix it."""

from __future__ import annotations

__all__ = [
    "BrokenGraphError",
    "CallbackError",
    "CycleError",
    "MissingLabelError",
    "MissingTargetError",
    "ModeError",
    "OptionError",
    "PartitaError",
    "RegionError",
    "TreatmentError",
    "UnknownNodeError",
    "VerificationError",
]


class PartitaError(Exception):
    """The base of all errors that Partita raises on purpose."""


class BrokenGraphError(PartitaError, RuntimeError):
    """The graph itself is not well formed, so nothing can be said about it."""


class MissingTargetError(BrokenGraphError, AttributeError):
    """A node names an attribute or submodule that the module does not have."""


class RegionError(PartitaError, ValueError):
    """A region is empty, overlaps another, or holds nodes that no region can hold."""


class CycleError(PartitaError, RuntimeError):
    """Regions need each other, so no order of calls exists."""


class ModeError(PartitaError, AssertionError):
    """Grad, inference or autocast toggles that have no meaning as they stand."""


class CallbackError(PartitaError, ValueError):
    """A user's function raised, or answered with something that is no answer."""


class MissingLabelError(CallbackError, KeyError):
    """A mapping from nodes to labels leaves nodes out."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TreatmentError(PartitaError, RuntimeError):
    """A treatment raised, or gave something that cannot be called."""


class UnknownNodeError(PartitaError, KeyError):
    """No node of that name is in the program."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OptionError(PartitaError, TypeError, ValueError):
    """An option is unknown or has a value that it cannot take."""


class VerificationError(PartitaError, AssertionError):
    """Two programs that should mean the same do not."""
