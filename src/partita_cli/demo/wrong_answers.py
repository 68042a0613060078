"""Chapter: three small graphs that torch's `split_module` miscompiles silently, beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module as torch_split

from partita._torch.toggles import SET_GRAD  # noqa: PLC2701  What tracers record for a mode block.
from partita.compat.split_module import split_module

TITLE = "Three graphs that torch's split_module gets wrong, silently"


@dataclass(frozen=True)
class _Example:
    title: str
    build: Callable[[], GraphModule]
    parts: dict[str, int]
    observe: Callable[[GraphModule], object]

    def part_of(self, node: Node) -> int:
        return self.parts[node.name]


def show() -> bool:
    """Prints for each graph the results of the original, of torch's cut and of ours; returns whether ours are right."""
    passed = True
    for example in _EXAMPLES:
        original = example.observe(example.build())
        theirs = example.observe(torch_split(example.build(), None, example.part_of))  # type: ignore[arg-type]
        ours = example.observe(split_module(example.build(), None, example.part_of))
        print(f"{example.title}\n  original {original}\n  torch    {theirs}   {_verdict(theirs, original)}")
        print(f"  partita  {ours}   {_verdict(ours, original)}")
        passed &= ours == original
    return passed


def _verdict(found: object, wanted: object) -> str:
    return "same" if found == wanted else "WRONG"


def _mutation_after_read() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2), name="doubled")
    graph.create_node("call_method", "add_", (x, 1), name="written")
    graph.output(doubled)
    return GraphModule({}, graph)


def _two_random_calls() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.rand_like, (x,), name="first")
    second = graph.call_function(torch.rand_like, (x,), name="second")
    graph.output((first, second))
    return GraphModule({}, graph)


def _frozen_part() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,), name="off")
    frozen = graph.call_function(torch.mul, (x, 3), name="frozen")
    graph.call_function(SET_GRAD, (True,), name="on")
    trained = graph.call_function(torch.mul, (x, 5), name="trained")
    graph.output(graph.call_function(torch.add, (frozen, trained), name="both"))
    return GraphModule({}, graph)


def _result(module: GraphModule) -> object:
    value = module(torch.ones(2))
    return value.tolist()


def _seeded(module: GraphModule) -> object:
    torch.manual_seed(0)
    return [[round(number, 3) for number in value.tolist()] for value in module(torch.zeros(2))]


def _mode_after_first_part(module: GraphModule) -> object:
    part = next(iter(module.children()), None)
    with torch.enable_grad():
        if part is not None:
            part(torch.ones(2))
        enabled = torch.is_grad_enabled()
    return f"grad mode on after its first part has run alone: {enabled}"


_EXAMPLES = (
    _Example(
        "an in-place mutation in one part, an earlier read in another",
        _mutation_after_read,
        {"doubled": 1, "written": 0},
        _result,
    ),
    _Example("two random numbers in two parts", _two_random_calls, {"first": 1, "second": 0}, _seeded),
    _Example(
        "a no_grad block that begins in one part and ends in the next",
        _frozen_part,
        {"off": 0, "frozen": 0, "on": 1, "trained": 1, "both": 1},
        _mode_after_first_part,
    ),
)
