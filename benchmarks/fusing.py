"""Proposing partitions by what is supported, and fusing them, beside torch's partitioner and its splitter."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from torch.fx.passes.infra import partitioner as torch_partitioner

from benchmarks.isolated import measured
from benchmarks.models import exported_llama, functional
from benchmarks.partitioned import SomeNodes, refused_names
from benchmarks.rows import Row, Target, at_least, at_most
from benchmarks.scales import Scale
from partita import Program
from partita.analysis.nodes import bytes_of
from partita.policies import ByCapability
from partita.policies.capability import units_of
from partita.solvers.border_bytes import border_bytes

__all__ = ["rows"]

#: torch's search is about cubic, so it is stopped after this many CPU seconds.
_LIMIT_S = 25.0
_SHARES = (0.0, 0.01, 0.1, 0.5)


def rows(scale: Scale) -> Iterator[Row]:
    """Proposing, then proposing and fusing, then what crosses the borders of a model."""
    for nodes in scale.partitioned_nodes:
        for share in _SHARES:
            yield from _proposed(nodes, share)
    for nodes in scale.partitioned_nodes:
        for share in (0.01, 0.1):
            yield from _fused(nodes, share)
    if scale.layers:
        yield from _borders(min(scale.layers, 4))


def _proposed(nodes: int, share: float) -> Iterator[Row]:
    ours, theirs = _taken("ours, proposed", nodes, share), _taken("torch, proposed", nodes, share)
    case = f"residual {nodes:,}, {share:.0%} refused"
    target = at_least(1000) if nodes == 4_000 and share == 0.1 else None
    yield _beside("propose", case, ours, theirs, "torch's partitioner", target)
    if theirs["finished"]:
        yield Row(
            section="propose: partitions",
            case=case,
            unit="parts",
            ours=ours["parts"],
            beside="torch's partitioner",
            other=theirs["parts"],
            reading="of torch's",
            value=ours["parts"] / max(theirs["parts"], 1),
            target=at_most(1),
        )


def _fused(nodes: int, share: float) -> Iterator[Row]:
    ours = _taken("ours, fused", nodes, share)
    case = f"residual {nodes:,}, {share:.0%} refused"
    for way, other in (("torch, fused", "torch's partition_and_fuse"), ("splitter_base", "torch's splitter_base")):
        yield _beside("propose, fuse and call", case, ours, _taken(way, nodes, share), other, None)


def _taken(way: str, nodes: int, share: float) -> dict[str, Any]:
    how = {"limit_s": _LIMIT_S} if way.startswith("torch") and nodes >= 1_000 else {"repeats": 5}
    taken: dict[str, Any] = measured("partitioned", way=way, kind="residual", nodes=nodes, share=share, **how)
    return taken


def _beside(
    section: str, case: str, ours: dict[str, Any], theirs: dict[str, Any], other: str, target: Target | None
) -> Row:
    finished = theirs["finished"]
    return Row(
        section=section,
        case=case,
        unit="ms",
        ours=ours["cpu"] * 1e3,
        beside=other if finished else f"{other}, stopped after {_LIMIT_S:g} s",
        other=theirs["cpu"] * 1e3,
        reading="times sooner" if finished else "times sooner at least",
        value=theirs["cpu"] / ours["cpu"],
        target=target,
    )


def _borders(layers: int) -> Iterator[Row]:
    """The bytes that cross between regions of the policy, as a share of those between torch's partitions."""
    program = Program.of(functional(exported_llama(layers)))
    for share in (0.02, 0.1, 0.5):
        ratios = []
        for seed in range(8):
            support = SomeNodes(refused_names(program.graph_module, share, seed))
            chooser = torch_partitioner.CapabilityBasedPartitioner(
                program.graph_module, support, allows_single_node_partition=True
            )
            theirs = {node: at for at, part in enumerate(chooser.propose_partitions()) for node in part.nodes}
            found = ByCapability(support)(program)
            ours = {node: at for at, region in enumerate(found) for node in region.nodes}
            ratios.append(_border(program, support, ours) / _border(program, support, theirs))
        case = f"Llama {layers} layers, {share:.0%} refused, 8 choices"
        for name, value in (("median", median(ratios)), ("worst", max(ratios))):
            yield Row(
                section=f"bytes across borders, {name}",
                case=case,
                unit="of torch's",
                ours=value,
                reading="of torch's",
                value=value,
                target=at_most(1),
            )


def _border(program: Program, support: SomeNodes, parts: dict[Any, int]) -> int:
    units = units_of(program, (support,), together=None, modes_apart=True, devices_apart=False)
    nodes = program.index.nodes
    levels = [1 + parts.get(node, -1) for node in nodes]
    return border_bytes(units.relation, units.kinds, levels, [bytes_of(node) or 1 for node in nodes])
