"""Regions by capability in large graphs, and lowered models beside torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.isolated import measured
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale

__all__ = ["capability_rows", "rows"]

_MILLION = 1_000_000


def capability_rows(scale: Scale) -> Iterator[Row]:
    """How finding the regions grows, with nothing and with a tenth refused."""
    small, large = scale.grown
    for kind in ("residual", "random"):
        for share in (0.0, 0.1):
            before = measured("growing_capability", kind=kind, nodes=small, share=share, repeats=3)
            after = measured("growing_capability", kind=kind, nodes=large, share=share, repeats=1)
            case = f"{kind} {large:,}, {share:.0%} refused"
            yield Row(
                section="regions by capability",
                case=case,
                unit="s",
                ours=after["cpu"],
                beside=f"ours at {small:,}",
                other=before["cpu"],
                reading="times as long",
                value=after["cpu"] / before["cpu"],
                target=at_most(12) if large == _MILLION else None,
            )
            yield Row(
                section="regions by capability, seconds",
                case=case,
                unit="s",
                ours=after["cpu"],
                reading="seconds",
                value=after["cpu"],
                target=at_most(10) if large == _MILLION else None,
            )
            yield Row(
                section="regions by capability, peak of the process",
                case=case,
                unit="MB",
                ours=after["peak"] / 1e6,
                reading="MB",
                value=after["peak"] / 1e6,
                target=at_most(4_000) if large == _MILLION else None,
            )


def rows(scale: Scale) -> Iterator[Row]:
    """Models lowered whole and with a tenth of their operators refused; what a call of a region costs."""
    for inputs in (2, 10):
        taken = measured("call_overhead", inputs=inputs)
        yield Row(
            section="call of a lowered region",
            case=f"{inputs} inputs, Inductor, inference",
            unit="us",
            ours=taken["region"] * 1e6,
            beside="the compiled function",
            other=taken["function"] * 1e6,
            reading="us more",
            value=(taken["region"] - taken["function"]) * 1e6,
            target=at_most(10),
        )
    for model in ("Llama", "BERT") if scale.layers else ():
        for refused in (False, True):
            yield from _model(model, refused=refused)


def _model(model: str, *, refused: bool) -> Iterator[Row]:
    ours, theirs = (
        measured("lowered_model", model=model, way=way, refused=refused) for way in ("partita", "torch.compile")
    )
    what = "a tenth refused" if refused else "whole"
    other = "torch.compile, graph breaks" if refused else "torch.compile"
    for clock, name, unit, factor in (
        ("first", "first result", "s", 1.0),
        ("steady", "steady state", "ms", 1e3),
    ):
        yield Row(
            section=f"lowered with Inductor: {name}",
            case=f"exported {model}, 4 layers, {what}",
            unit=unit,
            ours=ours[clock] * factor,
            beside=other,
            other=theirs[clock] * factor,
            reading="of torch's time",
            value=ours[clock] / theirs[clock],
            target=at_most(1.1),
        )
