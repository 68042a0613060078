"""Reasons: words that say why a node is outside every region, with who decided it, so that reasons can be counted."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias, final

__all__ = ["ONLY_SWITCHES", "Reason", "ReasonKind"]

#: Why a mode switch is in no region.
ONLY_SWITCHES = "it only switches a mode"

#: Refused by whoever would treat the node; together with such a node; in a region that was not worthwhile; left out.
ReasonKind: TypeAlias = Literal["refused", "together", "not worthwhile", "left out"]


@final
class Reason(str):
    """A text that also knows its `kind`, `by` whom it was decided, and `why`."""

    __slots__ = ("by", "kind", "why")

    kind: ReasonKind
    by: str
    why: str

    def __new__(cls, text: str, *, kind: ReasonKind = "left out", by: str = "", why: str = "") -> Self:
        reason = super().__new__(cls, text)
        reason.kind, reason.by, reason.why = kind, by, why or text
        return reason

    @classmethod
    def refused(cls, by: str, why: str) -> Self:
        return cls(f"refused by {by}: {why}", kind="refused", by=by, why=why)

    @classmethod
    def of(cls, text: str) -> Self:
        """`text` itself where it is a reason, or a reason of that text."""
        return text if isinstance(text, cls) else cls(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (str(self), self.kind, self.by, self.why)


def _rebuilt(text: str, kind: ReasonKind, by: str, why: str) -> Reason:
    return Reason(text, kind=kind, by=by, why=why)
