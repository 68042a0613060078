"""What a region must not do if it is to be recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from partita._torch.schemas import Signature, registers_hook, signatures_of, signatures_of_method
from partita.backends.transforms import is_inside_transform
from partita.errors import RecomputeError
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.regions import Region

__all__ = ["check_body", "draws_from_own_generator"]


def check_body(body: Program, region: Region) -> None:
    """Raises where a second run of the body of a region could not give what the first gave."""
    nodes = body.index.nodes
    inside = next(filter(is_inside_transform, region.nodes), None)
    if inside is not None:
        raise RecomputeError(
            f"node {inside.name!r} in region {region.name!r} runs inside a transform of torch.func, whose levels "
            "are gone when the backward runs; leave the whole transform out of the region"
        )
    for number in body.effects.barriers:
        raise RecomputeError(
            f"node {nodes[number].name!r} in region {region.name!r} calls what nobody knows, so it may do what must "
            "not be done twice; declare it with Program.of(..., pure=[...]), or leave it out of the region"
        )
    for node in _all_nodes(body.graph_module):
        what = _done_again(node)
        if what is not None:
            raise RecomputeError(
                f"node {node.name!r} in region {region.name!r} {what}, which would happen again; leave it out"
            )


def _done_again(node: Node) -> str | None:
    """What a node does that must not be done twice."""
    if node.target is print:
        return "prints"
    if registers_hook(node.target):
        return "registers a hook"
    return "draws from a generator of its own" if draws_from_own_generator(node) else None


def draws_from_own_generator(node: Node) -> bool:
    """Whether a call is given a generator, by keyword or by its place in a schema; the default ones are put back."""
    if node.kwargs.get("generator") is not None:
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    signatures = signatures_of_method(str(node.target)) if node.op == "call_method" else signatures_of(node.target)
    return any(_is_generator(given) for signature in signatures for given in _in_place_of_generator(node, signature))


def _in_place_of_generator(node: Node, signature: Signature) -> Iterator[object]:
    for argument in signature.arguments:
        if argument.name == "generator" and 0 <= argument.position < len(node.args):
            yield node.args[argument.position]


def _is_generator(given: object) -> bool:
    """Whether an argument may be a generator; another overload may have something else in that place."""
    if not isinstance(given, Node):
        return isinstance(given, torch.Generator)
    value = value_of(given)
    return value is None or isinstance(value, torch.Generator)


def _all_nodes(body: GraphModule) -> Iterator[Node]:
    """The nodes of a body, and of the bodies that its operators run."""
    for module in body.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
