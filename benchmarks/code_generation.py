"""How often Python code is generated for parts that go to a compiler: never, since a compiler reads the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn
from torch.fx import Graph, GraphModule

import partita
from benchmarks.graphs import build, even_labels
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS
from partita.analysis.tolerance import EXACT, Tolerance
from partita.compat.split_module import split_module
from partita.policies import ByLabel

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Parts compiled through AOTAutograd, from `split_module` and from a plan; then the model is called."""
    del scale  # A count needs no size.
    module = build("residual", 320)
    yield _row("split_module", lambda: _compiled(_split(module)))
    yield _row("plan", lambda: _planned(module))


def _row(way: str, cut: Callable[[], GraphModule]) -> Row:
    generated: list[Graph] = []
    with mock.patch.object(Graph, "python_code", _noting(Graph.python_code, generated)):
        whole = cut()
        whole(torch.ones(2, 2))
    of_parts = {id(part.graph) for part in _Compiled.seen}
    _Compiled.seen.clear()
    count = sum(id(graph) in of_parts for graph in generated)
    return Row(
        section="code for compiled parts",
        case=f"{way}, {len(of_parts)} parts",
        unit="times",
        ours=float(count),
        reading="times",
        value=float(count),
        target=at_most(0),
    )


class _Compiled(nn.Module):
    """A part that is compiled when its inputs are known, as Dynamo's backends are."""

    seen: ClassVar[list[GraphModule]] = []

    def __init__(self, part: GraphModule) -> None:
        super().__init__()
        self.seen.append(part)
        self._part = (part,)
        self._function: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        if self._function is None:
            from torch._dynamo.backends.debugging import aot_eager  # Takes seconds to import.

            self._function = aot_eager(self._part[0], list(args))
        return self._function(*args)


@dataclass(frozen=True)
class _Compile:
    """A treatment: the part goes to a compiler."""

    tolerance: ClassVar[Tolerance] = EXACT
    allows_mixed_modes: ClassVar[bool] = False

    def treat(self, body: GraphModule) -> nn.Module:
        return _Compiled(body)

    def marks(self, region: partita.Region) -> dict[str, object]:
        return {}


def _split(module: GraphModule) -> GraphModule:
    return split_module(module, None, even_labels(module, PARTS).__getitem__, tuple_return=True)


def _compiled(whole: GraphModule) -> GraphModule:
    for name, part in whole.named_children():
        assert isinstance(part, GraphModule)
        setattr(whole, name, _Compiled(part))
    return whole


def _planned(module: GraphModule) -> GraphModule:
    labels = even_labels(module, PARTS)
    program = partita.Program.of(module)
    return partita.plan(program, ByLabel(labels.__getitem__), _Compile()).apply().module()


def _noting(generate: Callable[..., Any], generated: list[Graph]) -> Callable[..., Any]:
    def python_code(graph: Graph, *args: Any, **kwargs: Any) -> Any:
        generated.append(graph)
        return generate(graph, *args, **kwargs)

    return python_code
