"""How much memory a split takes at its peak, beyond the graph that it is given."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.isolated import measured
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Each way to split in a process of its own."""
    nodes = scale.memory_nodes
    for kind in scale.large_kinds:
        others = {"split_module_simple": at_most(1), "minimal node copy": None}
        ours = _megabytes(kind, nodes, "ours")
        for way, target in others.items():
            other = _megabytes(kind, nodes, way)
            yield Row(
                section="peak memory",
                case=f"{kind} {nodes:,}, {PARTS} parts",
                unit="MB",
                ours=ours,
                beside=way,
                other=other,
                reading="of its peak",
                value=ours / other,
                target=target if nodes >= 256_000 else None,
            )


def _megabytes(kind: str, nodes: int, way: str) -> float:
    peak = float(measured("peak_bytes", kind=kind, nodes=nodes, way=way))
    return max(peak, 1.0) / 1e6
