"""How time grows with the graph, up to a million nodes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.isolated import measured
from benchmarks.rows import Row, at_least, at_most
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS
from benchmarks.timing import median, quotient

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Large graphs beside torch where torch can, then ours alone."""
    for kind in scale.large_kinds:
        for nodes in scale.beside_simple:
            yield from _large(kind, nodes, scale)
        yield from _grown(kind, *scale.grown)


def _large(kind: str, nodes: int, scale: Scale) -> Iterator[Row]:
    slow = scale.with_slow_torch
    taken = measured("large_split", kind=kind, nodes=nodes, slow=slow, repeats=3 if slow else 1)
    ours = taken.pop("ours")
    for other, spent in taken.items():
        yield Row(
            section="split",
            case=f"{kind} {nodes:,}, {PARTS} parts",
            unit="ms",
            ours=median(ours) * 1e3,
            beside=other,
            other=median(spent) * 1e3,
            reading="times sooner",
            value=quotient(spent, ours),
            target=at_least(8 if other == "split_module" else 2),
        )


def _grown(kind: str, small: int, large: int) -> Iterator[Row]:
    """Our split, with a target for user time, and the least that any copy does, which has none."""
    for way, clocks in (("ours", ("user", "cpu")), (_FLOOR, ("user",))):
        before, after = (
            measured("growing_split", kind=kind, nodes=nodes, way=way, repeats=3) for nodes in (small, large)
        )
        for clock in clocks:
            has_target = (way, clock) == ("ours", "user") and (small, large) == (100_000, 1_000_000)
            yield Row(
                section=f"growth of {clock} time" + ("" if way == "ours" else f", {way}"),
                case=f"{kind} {large:,}, {PARTS} parts",
                unit="ms",
                ours=after[clock] * 1e3,
                beside=f"the same at {small:,}",
                other=before[clock] * 1e3,
                reading="times as long",
                value=after[clock] / before[clock],
                target=at_most(12) if has_target else None,
            )


_FLOOR = "minimal node copy"
