"""What each step of a split costs by itself, beside the floor: copying every node once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import GraphModule, Node

from benchmarks.floor import minimal_copy
from benchmarks.graphs import build, even_labels
from benchmarks.models import exported_llama, functional
from benchmarks.rows import Row
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS
from benchmarks.timing import interleaved, median, quotient
from partita import Partition, Program, Region
from partita.analysis.effects.calls import CallEffects
from partita.analysis.effects.graph import effects_of_graph
from partita.analysis.index import Index
from partita.analysis.modes import modes_of
from partita.rewrite.outline import outline

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """The steps on a graph without effects, on one with many, and on the exported model."""
    nodes, repeats = scale.analysed_nodes, 3 if scale.layers else 1
    for kind in ("residual", "random", "writes"):
        yield from _rows(f"{kind} {nodes:,}, {PARTS} parts", build(kind, nodes), PARTS, repeats)
    if scale.layers:
        module = functional(exported_llama(scale.layers))
        yield from _rows(f"Llama {scale.layers} layers, 32 parts", module, 32, repeats)


def _rows(case: str, module: GraphModule, parts: int, repeats: int) -> Iterator[Row]:
    count = len(module.graph.nodes)
    taken = interleaved(_steps(module, parts), repeats)
    floor = taken.pop("floor")
    for step, spent in taken.items():
        yield Row(
            section="step",
            case=f"{step}: {case}",
            unit="us/node",
            ours=median(spent) / count * 1e6,
            beside="minimal node copy",
            other=median(floor) / count * 1e6,
            reading="of the floor",
            value=quotient(spent, floor),
        )


def _steps(module: GraphModule, parts: int) -> dict[str, Callable[[], object]]:
    """Each step on its own, given what the steps before it have found."""
    labels = even_labels(module, parts)
    program = Program.of(module)
    index, effects, modes = program.index, program.effects, program.modes
    partition = Partition(program, _regions(program, labels.__getitem__))
    assert (effects, modes) == (program.effects, program.modes)
    return {
        "index": lambda: Index(module.graph),
        "effects": lambda: effects_of_graph(CallEffects(module, index=index)),
        "modes": lambda: modes_of(index),
        "labels": lambda: _regions(program, labels.__getitem__),
        "legality and borders": lambda: Partition(program, partition.regions),
        "outline": lambda: outline(partition),
        "floor": lambda: minimal_copy(module.graph),
    }


def _regions(program: Program, label_of: Callable[[Node], int]) -> list[Region]:
    held: dict[int, list[Node]] = {}
    for node in program.operators():
        held.setdefault(label_of(node), []).append(node)
    return [Region(f"part_{label}", tuple(nodes), label) for label, nodes in held.items()]
