"""Chapter: three small graphs that torch's `split_module` changes without a word, beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule
from torch.fx.passes.split_module import split_module as torch_split

from partita._torch.toggles import SET_GRAD
from partita.compat.split_module import split_module

__all__ = ["TITLE", "tell"]


TITLE = "Three graphs that torch's split_module gets wrong, silently"


@dataclass(frozen=True)
class _Story:
    title: str
    build: Callable[[], GraphModule]
    parts: dict[str, int]
    observe: Callable[[GraphModule], object]


def tell() -> bool:
    """Prints a row a graph: what the original gives, what torch's cut gives, what ours gives."""
    passed = True
    for story in _STORIES:
        original = story.observe(story.build())
        theirs = story.observe(torch_split(story.build(), None, lambda node, story=story: story.parts[node.name]))  # type: ignore[misc, arg-type]
        ours = story.observe(split_module(story.build(), None, lambda node, story=story: story.parts[node.name]))  # type: ignore[misc]
        print(f"{story.title}\n  original {original}\n  torch    {theirs}   {_verdict(theirs, original)}")
        print(f"  partita  {ours}   {_verdict(ours, original)}")
        passed &= ours == original
    return passed


def _verdict(found: object, wanted: object) -> str:
    return "same" if found == wanted else "WRONG"


def _write_after_read() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2), name="doubled")
    graph.create_node("call_method", "add_", (x, 1), name="written")
    graph.output(doubled)
    return GraphModule({}, graph)


def _two_draws() -> GraphModule:
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


_STORIES = (
    _Story(
        "an in-place write in one part, an earlier read in another",
        _write_after_read,
        {"doubled": 1, "written": 0},
        _result,
    ),
    _Story("two random draws in two parts", _two_draws, {"first": 1, "second": 0}, _seeded),
    _Story(
        "a no_grad block that begins in one part and ends in the next",
        _frozen_part,
        {"off": 0, "frozen": 0, "on": 1, "trained": 1, "both": 1},
        _mode_after_first_part,
    ),
)
