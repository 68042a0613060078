"""The Treatment protocol: what is called in the place of a region, or how its nodes are marked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, TypeGuard, TypeVar, final, runtime_checkable

from torch import nn
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita.analysis.modes import AMBIENT, Mode
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import LoweringError, TreatmentError
from partita.plans.compilations import Compilations, Failures
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.operator_calls import OperatorCall

T = TypeVar("T")
V = TypeVar("V")


@final
@dataclass(frozen=True, slots=True)
class Called(metaclass=PlainHelp):
    """What a region becomes: a call of a module, through an operator if there is one, or the module's own nodes."""

    module: nn.Module
    through: OperatorCall | None = None
    inlined: bool = False


@runtime_checkable
class Treats(Protocol):
    """A treatment that decides what is called."""

    def treat(self, body: GraphModule) -> nn.Module | Called:
        """What is called in the place of the region: `body` itself, or an equivalent module."""


@final
@dataclass(frozen=True, slots=True)
class Site(metaclass=PlainHelp):
    """Where a body will be called: its region, which is `place` of `count`, and what is known of the caller's modes.

    Failures at run time are added to `failures`, and what is compiled to `compilations`; the plan shows both.
    """

    region: Region
    #: The program that is cut; None where only the body is known.
    program: Program | None = None
    place: int = 0
    count: int = 1
    caller: Mode = AMBIENT
    failures: Failures = field(default_factory=Failures)
    compilations: Compilations = field(default_factory=Compilations)


@runtime_checkable
class TreatsAt(Protocol):
    """A treatment that also depends on the call site."""

    def treat_at(self, body: GraphModule, site: Site) -> nn.Module | Called:
        """As `treat`, for a known call site."""


@runtime_checkable
class SharesBodies(Protocol):
    """A treatment whose result for one body can be called by other regions with an equal body."""

    def sharing_key(self, site: Site) -> Hashable | None:
        """What the result depends on beside the body; None if it is for this site alone."""


@runtime_checkable
class Marks(Protocol):
    """A treatment that marks."""

    def marks(self, region: Region) -> Mapping[str, object]:
        """Metadata for every node of the region."""


@runtime_checkable
class MarksNodes(Protocol):
    """A treatment that also marks single nodes."""

    def node_marks(self, region: Region) -> Mapping[Node, Mapping[str, object]]:
        """More metadata for some nodes, of the region or around it."""


#: What happens to a region: a frozen dataclass of plain values that treats, or marks, or both. It may also have
#: `tolerance`, a `Tolerance` by which it may change numbers (exact if missing), and `allows_mixed_modes`, whether one
#: body may hold nodes of several grad, inference or autocast modes (true if missing), and `puts_back_modes`, whether a
#: program all of whose modes are treated restores those that it used to leave switched (false if missing), and
#: `annotation_suffices`, whether a compiler of the whole graph that reads its marks needs no cut (false if missing),
#: and `stays_eager`, whether the body is left to Python inside torch.compile (false if missing).
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


def stays_eager(treatment: Treatment) -> bool:
    """Whether no compiler gets the body."""
    return bool(getattr(treatment, "stays_eager", False))


def marks_of(treatment: Treatment, region: Region) -> Mapping[str, object]:
    """Metadata for every node of the region."""
    return _mapping(treatment.marks, treatment, region) if isinstance(treatment, Marks) else {}


def node_marks_of(treatment: Treatment, region: Region) -> Mapping[Node, Mapping[str, object]]:
    """Metadata for single nodes, which overrides that of all nodes of a region."""
    return _mapping(treatment.node_marks, treatment, region) if isinstance(treatment, MarksNodes) else {}


def annotation_suffices(treatment: Treatment) -> bool:
    """Whether a compiler that reads the marks needs no cut."""
    return bool(getattr(treatment, "annotation_suffices", False))


def treated(treatment: Treatment, body: GraphModule, site: Site) -> Called:
    """What is called in the place of `body` according to the treatment."""
    result: object = body
    region = site.region
    if isinstance(treatment, TreatsAt):
        result = call_treatment(partial(treatment.treat_at, site=site), body, treatment, region)
    elif isinstance(treatment, Treats):
        result = call_treatment(treatment.treat, body, treatment, region)
    called = Called(result) if isinstance(result, nn.Module) else result
    if not isinstance(called, Called):
        raise TreatmentError(
            f"{treatment!r} returned {type(result).__name__} for region {region.name!r}; `treat` returns a module"
        )
    return called


def _mapping(method: Callable[[Region], Mapping[T, V]], treatment: Treatment, region: Region) -> Mapping[T, V]:
    marks = call_treatment(method, region, treatment, region)
    if not isinstance(marks, Mapping):
        raise TreatmentError(
            f"{treatment!r} returned {type(marks).__name__} as marks for region {region.name!r}; return a mapping"
        )
    return marks


def call_treatment(function: Callable[[T], V], argument: T, treatment: Treatment, region: Region) -> V:
    """The result of a method of a treatment; its errors name the treatment and the region."""
    try:
        return function(argument)
    except (TreatmentError, LoweringError):
        raise
    except Exception as error:
        raise TreatmentError(
            f"{treatment!r} raised {type(error).__name__} for region {region.name!r}: {error}; nothing was changed"
        ) from error
