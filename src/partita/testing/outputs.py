"""Outputs: what a program returns, in every structure that a graph can return."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from partita.testing.draft import Draft
from partita.testing.recipe import Picks, Step

__all__ = ["OUTPUT_KINDS", "PLAIN_OUTPUT_KINDS", "place_output"]

PLAIN_OUTPUT_KINDS = ("single", "tuple")
OUTPUT_KINDS = ("single", "tuple", "list", "dict", "nested", "echo", "twice", "constant", "none", "whole", "number")


def place_output(draft: Draft, output: Step, *, pytree: bool) -> None:
    """Ends the graph."""
    draft.graph.output(list(_chosen(draft, output.picks)[:3]) if pytree else _structure(draft, output))


def _structure(draft: Draft, output: Step) -> Any:
    first, second, third, *more = _chosen(draft, output.picks)
    match output.kind:
        case "tuple":
            return (first, second, third, *more)
        case "list":
            return [first, second, third]
        case "dict":
            return {"first": first, "second": second}
        case "nested":
            return (first, {"inner": [second, (third, None)]})
        case "echo":
            return (first, draft.inputs[0], second)
        case "twice":
            return (first, second, first)
        case "constant":
            return (1, first, None, "text", 0.5, second)
        case "none":
            return None
        case "whole":
            return (_newest_of(draft, first, tuple, list, dict), first)
        case "number":
            return (first, _newest_of(draft, second, int, float))
    return first


def _chosen(draft: Draft, picks: Picks) -> list[Node]:
    """Four tensors: the newest, one that has a gradient where any does, and two from anywhere."""
    tensors = [node for node, value in draft.values.items() if isinstance(value, Tensor)]
    trained = [node for node in tensors if draft.values[node].requires_grad] or tensors
    return [
        tensors[-1],
        draft.choose(picks[0] % 4, trained),
        draft.choose(picks[1], tensors),
        draft.choose(picks[2], tensors),
    ]


def _newest_of(draft: Draft, otherwise: Node, *types: type) -> Node:
    found = draft.valued(*types)
    return found[-1] if found else otherwise
