"""How soon a split returns, beside torch's two ways to split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import GraphModule
from torch.fx.passes import split_module as torch_split

from benchmarks.graphs import build, even_labels
from benchmarks.models import exported_llama, functional, has_targets
from benchmarks.rows import Row, Target, at_least
from benchmarks.scales import Scale
from benchmarks.timing import interleaved, median, quotient
from partita.compat import split_module as our_split

__all__ = ["PARTS", "rows", "splits"]

PARTS = 16


def rows(scale: Scale) -> Iterator[Row]:
    """Synthetic graphs without metadata, then the exported model with it."""
    for kind in scale.kinds:
        for nodes, repeats in scale.beside_torch.items():
            targets = (at_least(8), at_least(2)) if nodes in (16_000, 64_000) else (None, None)
            yield from _rows(f"{kind} {nodes:,}, {PARTS} parts", build(kind, nodes), PARTS, repeats, targets)
    if not scale.layers:
        return
    program = exported_llama(scale.layers)
    targets = (at_least(5), at_least(2)) if has_targets(scale.layers) else (None, None)
    for parts in (32, 100):
        repeats = max(scale.beside_torch.values())
        graph = functional(program)
        case = f"Llama {scale.layers} layers, {len(graph.graph.nodes):,}, {parts} parts"
        yield from _rows(case, graph, parts, repeats, targets)
        module = program.module()
        assert isinstance(module, GraphModule)
        case = f"Llama as module, {len(module.graph.nodes):,}, {parts} parts"
        # `split_module_simple` cannot cut a graph that reads attributes.
        yield from _rows(case, module, parts, repeats, (targets[0], None), simple=False)


def splits(
    module: GraphModule, parts: int, *, slow: bool = True, simple: bool = True
) -> dict[str, Callable[[], GraphModule]]:
    """Ways to cut `module` into runs of equal length, by name; the labels are known in advance to each of them."""
    labels = even_labels(module, parts)
    ways: dict[str, Callable[[], GraphModule]] = {
        "ours": lambda: our_split.split_module(module, None, labels.__getitem__)
    }
    if slow:
        ways["split_module"] = lambda: torch_split.split_module(module, module, labels.__getitem__)
    if simple:
        ways["split_module_simple"] = lambda: torch_split.split_module_simple(module, labels)
    return ways


def _rows(
    case: str,
    module: GraphModule,
    parts: int,
    repeats: int,
    targets: tuple[Target | None, Target | None],
    *,
    simple: bool = True,
) -> Iterator[Row]:
    taken = interleaved(splits(module, parts, simple=simple), repeats)
    for other, target in zip(("split_module", "split_module_simple"), targets, strict=True):
        if other in taken:
            yield Row(
                section="split",
                case=case,
                unit="ms",
                ours=median(taken["ours"]) * 1e3,
                beside=other,
                other=median(taken[other]) * 1e3,
                reading="times sooner",
                value=quotient(taken[other], taken["ours"]),
                target=target,
            )
