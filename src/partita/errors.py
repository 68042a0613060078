"""Every error that Partita raises: what is wrong, with which names, and what would fix it."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PicklingError

__all__ = [
    "ArchiveError",
    "BackendError",
    "BrokenGraphError",
    "BudgetError",
    "CallbackError",
    "CaptureError",
    "CycleError",
    "LoweringError",
    "MissingLabelError",
    "MissingTargetError",
    "ModeError",
    "NoMatchError",
    "NotPicklableError",
    "OptionError",
    "PartitaError",
    "PlanFileError",
    "RecomputeError",
    "RegionError",
    "SignatureError",
    "TreatmentError",
    "UnknownNodeError",
    "UntrustedArchiveError",
    "VerificationError",
]


class PartitaError(Exception):
    """The base of all errors that Partita raises on purpose."""


class BrokenGraphError(PartitaError, RuntimeError):
    """The graph itself is not well formed, so it cannot be analysed."""


class MissingTargetError(BrokenGraphError, AttributeError):
    """A node names an attribute or submodule that the module does not have."""


class RegionError(PartitaError, ValueError):
    """A region is empty, overlaps another, or holds nodes that no region can hold."""


class NoMatchError(PartitaError, LookupError):
    """A policy selects nothing in a program."""


class CycleError(PartitaError, RuntimeError):
    """Regions depend on each other, so no order of calls exists."""


class ModeError(PartitaError, AssertionError):
    """Grad, inference or autocast toggles that have no meaning as they stand."""


class CallbackError(PartitaError, ValueError):
    """A user's function raised, or returned an invalid result."""


class MissingLabelError(CallbackError, KeyError):
    """A mapping from nodes to labels does not cover every node."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TreatmentError(PartitaError, RuntimeError):
    """A treatment raised, or returned something that cannot be called."""


class RecomputeError(TreatmentError):
    """A region cannot be recomputed for backward, or not with the values that it had."""


class BudgetError(PartitaError, ValueError):
    """A training step cannot fit into a memory budget, or there is no training step to fit."""

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        #: The smallest peak in bytes that a plan is known for, if any is.
        self.smallest = smallest


class LoweringError(PartitaError, RuntimeError):
    """A region could not be compiled, and falling back to eager execution was not allowed."""


class BackendError(PartitaError, RuntimeError):
    """A backend cannot compile a body for a call, store or load a compiled function, or compiled one whose results
    differ from those of the body."""


class UnknownNodeError(PartitaError, KeyError):
    """No node of that name is in the program."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OptionError(PartitaError, TypeError, ValueError):
    """An option is unknown or has a value that it cannot take."""


class SignatureError(PartitaError, ValueError):
    """The signature of an exported program, or the description of a joint graph, does not match the graph."""


class CaptureError(PartitaError, RuntimeError):
    """A model cannot be captured, or not with the full meaning of its mode blocks."""


class NotPicklableError(PartitaError, PicklingError, TypeError):
    """A module calls something that no other process could find."""


class VerificationError(PartitaError, AssertionError):
    """Two programs that should be equivalent are not."""


class PlanFileError(PartitaError, ValueError):
    """A plan cannot be written to a file, or a file is no plan for this program."""


class ArchiveError(PartitaError, ValueError):
    """A file is no archive of an exported program, or one that cannot be read here; or no file can hold a program."""


class UntrustedArchiveError(ArchiveError):
    """An archive contains more than data, and the caller did not mark it as trusted."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names as a message has them, and the number of the others."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
