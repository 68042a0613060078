"""What a treatment is: it decides what is called in the place of a region, or marks the region's nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, TypeGuard, TypeVar, final, runtime_checkable

from torch import nn
from torch.fx import GraphModule, Node

from partita.analysis.mode import AMBIENT, Mode
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import TreatmentError
from partita.plans.failures import Failures
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.operator_calls import OperatorCall

__all__ = [
    "Called",
    "Marks",
    "Site",
    "Treatment",
    "Treats",
    "allows_mixed_modes",
    "annotation_suffices",
    "is_treatment",
    "marks_of",
    "node_marks_of",
    "puts_back_modes",
    "tolerance_of",
    "treated",
]


T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Called:
    """What a region becomes: a call of a module, through an operator where one is given, or the module's own nodes."""

    module: nn.Module
    through: OperatorCall | None = None
    inlined: bool = False


@runtime_checkable
class Treats(Protocol):
    """A treatment that decides what is called."""

    def treat(self, body: GraphModule) -> nn.Module | Called:
        """What is called in the place of the region: `body` itself, or something that means the same."""


@final
@dataclass(frozen=True, slots=True)
class Site:
    """Where a body will be called: its region, which is `place` of `count`, and what is known of the caller's modes.

    What goes wrong there at run time belongs into `failures`, where the plan keeps it.
    """

    region: Region
    #: The program that is cut; None where only the body is known.
    program: Program | None = None
    place: int = 0
    count: int = 1
    caller: Mode = AMBIENT
    failures: Failures = field(default_factory=Failures)


@runtime_checkable
class TreatsAt(Protocol):
    """A treatment that decides by where the body will be called, too."""

    def treat_at(self, body: GraphModule, site: Site) -> nn.Module | Called:
        """What `treat` would give if `site` were unknown."""


@runtime_checkable
class Marks(Protocol):
    """A treatment that marks."""

    def marks(self, region: Region) -> Mapping[str, object]:
        """Metadata for every node of the region."""


@runtime_checkable
class MarksNodes(Protocol):
    """A treatment that marks single nodes, too."""

    def node_marks(self, region: Region) -> Mapping[Node, Mapping[str, object]]:
        """More metadata for some nodes, of the region or around it."""


#: What happens to a region: a frozen dataclass of plain values that treats, or marks, or both. It may also have
#: `tolerance`, a `Tolerance` by which it may change numbers (exact if missing), and `allows_mixed_modes`, whether one
#: body may hold nodes of several grad, inference or autocast modes (true if missing), and `puts_back_modes`, whether a
#: program all of whose modes are treated puts back those that it used to leave switched (false if missing), and
#: `annotation_suffices`, whether a compiler of the whole graph that reads its marks needs no cut (false if missing).
Treatment: TypeAlias = Treats | TreatsAt | Marks


def is_treatment(candidate: object) -> TypeGuard[Treatment]:
    """Whether `candidate` can treat or mark; a class has the methods of its instances, but is none."""
    return isinstance(candidate, Treats | TreatsAt | Marks) and not isinstance(candidate, type)


def tolerance_of(treatment: Treatment) -> Tolerance:
    """How far the treatment may change numbers."""
    tolerance = getattr(treatment, "tolerance", EXACT)
    if not isinstance(tolerance, Tolerance):
        raise TreatmentError(f"{treatment!r} has the tolerance {tolerance!r}; give it a partita.Tolerance")
    return tolerance


def allows_mixed_modes(treatment: Treatment) -> bool:
    """Whether one body may hold nodes of several modes."""
    return bool(getattr(treatment, "allows_mixed_modes", True))


def puts_back_modes(treatment: Treatment) -> bool:
    """Whether nothing is left switched for the caller."""
    return bool(getattr(treatment, "puts_back_modes", False))


def marks_of(treatment: Treatment, region: Region) -> Mapping[str, object]:
    """Metadata for every node of the region."""
    if not isinstance(treatment, Marks):
        return {}
    found = _asked(treatment.marks, region, treatment, region)
    if not isinstance(found, Mapping):
        raise TreatmentError(
            f"{treatment!r} gave {type(found).__name__} as marks of region {region.name!r}; `marks` returns a mapping"
        )
    return found


def node_marks_of(treatment: Treatment, region: Region) -> Mapping[Node, Mapping[str, object]]:
    """Metadata for single nodes, which goes before what all nodes of a region get."""
    if not isinstance(treatment, MarksNodes):
        return {}
    found = _asked(treatment.node_marks, region, treatment, region)
    if not isinstance(found, Mapping):
        raise TreatmentError(
            f"{treatment!r} gave {type(found).__name__} as marks of nodes in region {region.name!r}; `node_marks` "
            "returns a mapping from nodes to their metadata"
        )
    return found


def annotation_suffices(treatment: Treatment) -> bool:
    """Whether a compiler that reads the marks needs no cut."""
    return bool(getattr(treatment, "annotation_suffices", False))


def treated(treatment: Treatment, body: GraphModule, site: Site) -> Called:
    """What the treatment gives to be called, as long as that can be called."""
    given: object = body
    region = site.region
    if isinstance(treatment, TreatsAt):
        given = _asked(partial(treatment.treat_at, site=site), body, treatment, region)
    elif isinstance(treatment, Treats):
        given = _asked(treatment.treat, body, treatment, region)
    called = Called(given) if isinstance(given, nn.Module) else given
    if not isinstance(called, Called):
        raise TreatmentError(
            f"{treatment!r} gave {type(given).__name__} for region {region.name!r}; `treat` returns a module"
        )
    return called


def _asked(function: Callable[[T], object], subject: T, treatment: Treatment, region: Region) -> object:
    try:
        return function(subject)
    except TreatmentError:
        raise
    except Exception as error:
        raise TreatmentError(
            f"{treatment!r} raised {type(error).__name__} for region {region.name!r}: {error}; nothing was changed"
        ) from error
