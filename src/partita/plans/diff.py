"""What differs between two plans, in lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from partita._plain_help import PlainHelp
from partita.program.fingerprint import program_digest

if TYPE_CHECKING:
    from partita.plans.plan import Plan
    from partita.regions import Region


@final
@dataclass(frozen=True, slots=True)
class PlanDiff(metaclass=PlainHelp):
    """What differs between two plans; it prints as lines, and is false if nothing does."""

    lines: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(self.lines) or "the plans are equal"


def plan_diff(one: Plan, other: Plan) -> PlanDiff:
    """What the second plan changes: regions by name, their nodes and their treatments."""
    ones, others = (
        {region.name: (region, treatment) for region, treatment in zip(plan.partition, plan.treatments, strict=True)}
        for plan in (one, other)
    )
    lines = []
    if one.program.graph_module is not other.program.graph_module and program_digest(one.program) != program_digest(
        other.program
    ):
        lines.append("  the plans are for different programs, so nodes of one name may be different ones")
    if one.puts_back_modes != other.puts_back_modes:
        lines.append(f"  puts_back_modes: {one.puts_back_modes} -> {other.puts_back_modes}")
    lines += [f"- region {name!r}, {_count(one, ones[name][0])}" for name in ones if name not in others]
    lines += [f"+ region {name!r}, {_count(other, others[name][0])}" for name in others if name not in ones]
    for name in (name for name in ones if name in others):
        (before, treatment), (after, changed) = ones[name], others[name]
        old, new = ([node.name for node in region.nodes] for region in (before, after))
        for sign, names in (("-", _without(old, new)), ("+", _without(new, old))):
            lines += [f"  region {name!r}: {sign} {_some(names)}"] if names else []
        lines += [f"  region {name!r}: {treatment!r} -> {changed!r}"] if treatment != changed else []
        if before.label != after.label:
            lines.append(f"  region {name!r}: label {before.label!r} -> {after.label!r}")
    return PlanDiff(tuple(lines))


def _count(plan: Plan, region: Region) -> str:
    count = plan.partition.operator_count(region)
    return "1 node" if count == 1 else f"{count} nodes"


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
