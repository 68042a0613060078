"""How time grows with the graph, up to a million nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.isolated import measured
from benchmarks.models import has_targets
from benchmarks.rows import Row, at_least, at_most
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS
from benchmarks.timing import median, quotient

__all__ = ["repeat_rows", "rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Large graphs beside torch where torch can, then ours alone."""
    for kind in scale.large_kinds:
        for nodes in scale.beside_simple:
            yield from _large(kind, nodes, scale)
        yield from _grown(kind, *scale.grown)


def repeat_rows(scale: Scale) -> Iterator[Row]:
    """The layers of a large Llama, then growth: blocks of a hundred nodes, of four, and next to no repeats."""
    if has_targets(scale.layers):
        yield from _llama_rows(80)
    small, large = scale.grown
    for kind in ("blocks", "residual", "random"):
        taken = {
            nodes: measured("growing_repeats", kind=kind, nodes=nodes, repeats=1 if nodes == large else 3)
            for nodes in (small // 10, small, large)
        }
        for before, after in pairwise(taken):
            yield Row(
                section="repeats",
                case=f"{kind} {after:,}",
                unit="s",
                ours=taken[after]["cpu"],
                beside=f"ours at {before:,}",
                other=taken[before]["cpu"],
                reading="times as long",
                value=taken[after]["cpu"] / taken[before]["cpu"],
                target=at_most(12) if after == _MILLION else None,
            )
        yield Row(
            section="repeats, peak of the process",
            case=f"{kind} {large:,}",
            unit="MB",
            ours=taken[large]["peak"] / 1e6,
            reading="MB",
            value=taken[large]["peak"] / 1e6,
            target=at_most(4_000) if large == _MILLION else None,
        )


def _llama_rows(layers: int) -> Iterator[Row]:
    """The layers of a Llama with the sizes of Llama-3-70B, found and planned, then applied."""
    taken = measured("repeats_of_llama", layers=layers)
    case = f"Llama-3-70B, {taken['calls']:.0f} of {layers} layers found"
    for what, seconds, most in (("planned", taken["cpu"], 10), ("applied", taken["applied"], None)):
        yield Row(
            section="repeats",
            case=f"{case}, {what}",
            unit="s",
            ours=seconds,
            reading="s of CPU",
            value=seconds,
            target=None if most is None else at_most(most),
        )


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
_MILLION = 1_000_000
