"""Checks groups of nodes that are to be fused: their nodes, their joint legality, and free names for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.operator_schemas import flattens_inputs
from partita.analysis.nodes import find
from partita.errors import CycleError, OptionError, RegionError
from partita.program.program import Program
from partita.regions.partition import cycle_error
from partita.rewrite.fuse import names_module
from partita.solvers.quotient import ALONE, NOWHERE, quotient

#: The key in `meta` of a fused module under which its own placeholders are listed. The call does not pass them:
#: ExecuTorch's delegates, which hold their constants, get them by a signature of their own.
_OWNED = "owned_placeholders"


class FusionError(RegionError, AssertionError):
    """Nodes that cannot be fused: of another graph, erased, named twice, or an output."""


class FusionCycleError(CycleError, AssertionError):
    """Nodes that cannot run in one call, or not in the requested calls."""


def checked_module(gm: object, role: str = "nodes are fused in") -> GraphModule:
    """`gm`, when it is a graph module."""
    if not isinstance(gm, GraphModule):
        raise OptionError(f"{role} a torch.fx.GraphModule, not {type(gm).__name__}")
    return gm


def checked_nodes(gm: GraphModule, nodes: Iterable[Node], called: str) -> list[Node]:
    """The nodes, all of the graph of `gm` and fusible; a set is sorted in graph order."""
    if isinstance(nodes, Node | str) or not isinstance(nodes, Iterable):
        raise FusionError(f"{called} is a collection of nodes, not {nodes!r}")
    held: list[Any] = list(nodes)
    for node in held:
        if not isinstance(node, Node):
            raise FusionError(f"{called} holds {node!r}, which is no node; take the nodes from `gm.graph`")
        check_node(gm, node, called)
        if node.op == "output":
            raise FusionError(f"{called} holds {node.name!r}: the output of a graph cannot be fused; exclude it")
    if len(set(held)) != len(held):
        twice = next(node for place, node in enumerate(held) if node in held[:place])
        raise FusionError(f"{called} holds {twice.name!r} twice; name it once")
    return sorted(held) if isinstance(nodes, set | frozenset) else held


def check_node(gm: GraphModule, node: Node, called: str) -> None:
    """Raises unless `node` is in the graph of `gm`."""
    advice = "take the nodes from `gm.graph` as it is now"
    if node._erased:
        raise FusionError(f"{node} has been removed from owning graph, yet {called} names it; {advice}")
    if node.graph is not gm.graph:
        if node.graph.owning_module is gm:
            raise FusionError(f"{node} is not found in graph module {type(gm).__name__}: {called} is stale; {advice}")
        raise FusionError(f"{node} doesn't belong to passed in graph module {type(gm).__name__}: {called}; {advice}")


def record_owned(body: GraphModule, nodes: Iterable[Node]) -> None:
    """Records in the metadata of `body` which inputs it owns: the placeholders among the fused nodes."""
    owned = tuple(node.name for node in nodes if node.op == "placeholder")
    if owned:
        body.meta[_OWNED] = owned


def check_call(body: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
    """Raises unless `body` takes these inputs, beside placeholders that it owns, and returns enough outputs."""
    returned = body.graph.output_node().args[0]
    if isinstance(returned, tuple) and len(returned) < len(outputs):
        raise FusionError(
            f"{len(outputs)} nodes are to be replaced, but the inserted module returns {len(returned)} values"
        )
    placeholders = body.graph.find_nodes(op="placeholder")
    if flattens_inputs(body.graph) or any(str(node.target).startswith("*") for node in placeholders):
        return
    owned = body.meta.get(_OWNED, ())
    needed = sum(not node.args and node.name not in owned for node in placeholders)
    if not needed <= len(inputs) <= len(placeholders):
        raise FusionError(f"the inserted module takes {len(placeholders)} inputs, but orig_inputs are {len(inputs)}")


def check_together(program: Program, groups: Sequence[Sequence[Node]], names: Sequence[str]) -> None:
    """Raises unless the groups are disjoint and can run one after another by data and effect dependencies."""
    index, root, toggles = program.index, program.graph_module, program.modes.toggles
    owner = [NOWHERE if node.op in ("placeholder", "output") else ALONE for node in index.nodes]
    for at, group in enumerate(groups):
        for node in group:
            number = index.number[node]
            if owner[number] >= 0:
                raise FusionError(
                    f"{node} has been removed from owning graph by the time that {names[at]!r} is fused: "
                    f"{names[owner[number]]!r} holds it as well; take it out of one of them"
                )
            owner[number] = at
    for number in toggles:
        owner[number] = NOWHERE
    for node in index.graph.find_nodes(op="get_attr", sort=False):
        if names_module(node, root):
            owner[index.number[node]] = ALONE
    found = quotient(owner, len(groups), chain(index.edges(), program.effects.edges()))
    if found.stable_order() is None:
        raise FusionCycleError(f"Invalid partition, found dependency cycles: {cycle_error(program, names, found)}")


def free_names(root: nn.Module, prefix: str, count: int) -> list[str]:
    """`prefix` with the numbers from 0 on; if one of these is taken, with those after the highest that is taken."""
    folder, _, start = prefix.rpartition(".")
    holder = _holder(root, folder, prefix)
    taken = () if holder is None else {*holder._modules, *holder._parameters, *holder._buffers, *holder.__dict__}
    pattern = re.compile(re.escape(start) + r"(\d+)")
    used = [int(match[1]) for match in map(pattern.fullmatch, taken) if match]
    first = 1 + max(used) if any(number < count for number in used) else 0
    return [f"{prefix}{first + number}" for number in range(count)]


def free_name(root: nn.Module, body: nn.Module) -> str:
    """The name of the class of `body`; with the next free number where `root` has something else of that name."""
    name = type(body).__name__
    held = find(root, name)
    if held is None or held is body:
        return name
    prefix = name.rstrip("0123456789")
    number = int(name[len(prefix) :] or 0)
    while find(root, f"{prefix}{number}") is not None:
        number += 1
    return f"{prefix}{number}"


def _holder(root: nn.Module, folder: str, prefix: str) -> nn.Module | None:
    """The module at the path `folder`; None if there is nothing."""
    module: nn.Module | None = root
    for part in folder.split(".") if folder else ():
        held = getattr(module, part, None)
        if held is not None and not isinstance(held, nn.Module):
            raise OptionError(
                f"the prefix {prefix!r} would put modules into {part!r}, which is no module but of type "
                f"{type(held).__name__}; give a prefix whose folders are modules, or are free"
            )
        module = held
    return module
