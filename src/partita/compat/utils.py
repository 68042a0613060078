"""A drop-in replacement for the node helpers of `torch._export.utils`, with its names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita._torch.fx.graph_writer import GraphWriter, copy_meta
from partita._torch.gc_pause import gc_paused
from partita.analysis.modes import has_toggles
from partita.compat._fused_groups import checked_module
from partita.compat.split_module import NOTHING_OPEN, split_module
from partita.errors import BrokenGraphError
from partita.policies.legalize import call_user_function
from partita.program.program import Program
from partita.rewrite.in_place import inline_call
from partita.rewrite.state import module_like, share_state

__all__ = [
    "node_inline_",
    "node_replace_",
    "nodes_count",
    "nodes_filter",
    "nodes_first",
    "nodes_map",
    "sequential_split",
]


Nodes = TypeVar("Nodes", bound=Iterable[Node])


def nodes_filter(nodes: Iterable[Node], node_call_back: Callable[[Node], Any]) -> list[Node]:
    """The nodes for which `node_call_back` is true, in order."""
    return [node for node in nodes if node_call_back(node)]


def nodes_first(nodes: Iterable[Node], node_call_back: Callable[[Node], Any] | None = None) -> Node | None:
    """The first node, or the first for which `node_call_back` is true; None if there is none."""
    return next((node for node in nodes if node_call_back is None or node_call_back(node)), None)


def nodes_count(nodes: Iterable[Node], node_call_back: Callable[[Node], Any]) -> int:
    """The number of nodes for which `node_call_back` is true."""
    return len(nodes_filter(nodes, node_call_back))


def nodes_map(nodes: Nodes, node_call_back: Callable[[Node], Any]) -> Nodes:
    """The same `nodes`, after `node_call_back` was called with each in turn; it may change the graph."""
    for node in nodes:
        node_call_back(node)
    return nodes


def node_replace_(old_node: Node, new_node: Node) -> None:
    """Replaces all uses of `old_node` by `new_node`, in place, and erases `old_node`.

    A new node that comes after a user is moved up to it.
    """
    _check_replacement(old_node, new_node)
    early = _first_user_before(old_node, new_node)
    if early is not None:
        early.prepend(new_node)
    old_node.replace_all_uses_with(new_node)
    old_node.graph.erase_node(old_node)


def node_inline_(call_mod_node: Node) -> GraphModule | None:
    """The module around a call of a graph module, with the call inlined.

    It works in place, and changes nothing where it refuses. The called module is not changed: others may call it.
    """
    return inline_call(call_mod_node)


@gc_paused()
def sequential_split(gm: GraphModule, node_call_back: Callable[[Node], Node | bool]) -> GraphModule:
    """A new module in which a part begins at every node for which `node_call_back` is true; `gm` is not changed.

    Toggles stay in their parts, so a part switches the mode for the parts after it, as the graph did. A block that is
    open where the graph is cut is exited at the end of the part and reentered by the next one.
    """
    parts = _parts(checked_module(gm, "sequential_split takes").graph, node_call_back)
    if not has_toggles(gm.graph):
        return _split(gm, parts)
    _ = Program.of(gm).modes  # Raises where toggles are not paired.
    repeated = _repeated(gm.graph, parts)
    cut = _split(*_with_opaque_toggles(gm, parts))
    for call, repeats in zip(cut.graph.find_nodes(op="call_module"), repeated, strict=True):
        _write_toggles(cut.get_submodule(str(call.target)).graph, repeats)  # type: ignore[arg-type]
    return cut


def _check_replacement(old_node: Node, new_node: Node) -> None:
    problem = f"{old_node.name!r} cannot be replaced by {new_node.name!r}"
    if old_node is new_node:
        raise BrokenGraphError(f"{problem}: they are one node")
    if old_node.graph is not new_node.graph:
        raise BrokenGraphError(f"{problem}: they are in different graphs; copy it with `Graph.node_copy` first")
    if old_node._erased or new_node._erased:
        raise BrokenGraphError(f"{problem}: it is not in the graph any more")
    if old_node in new_node.all_input_nodes:
        raise BrokenGraphError(f"{problem}, which reads it; give it another input first")
    early = _first_user_before(old_node, new_node)
    if early is None:
        return
    late = next((node for node in new_node.all_input_nodes if not node < early), None)
    if late is not None:
        raise BrokenGraphError(
            f"{problem}: {early.name!r} reads it earlier, and what {new_node.name!r} reads comes after that; move "
            f"{late.name!r} up with `Node.prepend`"
        )
    if new_node.is_impure():
        raise BrokenGraphError(
            f"{problem}: {early.name!r} reads it earlier, and {new_node.name!r} has side effects, so it keeps "
            "its place; move it up with `Node.prepend` if that is meant"
        )


def _first_user_before(old_node: Node, new_node: Node) -> Node | None:
    """The first user of the old node that comes before the new one."""
    return min((user for user in old_node.users if user < new_node), default=None)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """The toggles that a part repeats at its beginning, and those whose blocks it exits at its end."""

    entered: tuple[Node, ...]
    exited: tuple[Node, ...] = ()


def _parts(graph: Graph, node_call_back: Callable[[Node], Node | bool]) -> dict[Node, int]:
    """The part of every node, the inputs and the output included: each may begin a part."""
    parts, last = {}, 0
    for node in graph.nodes:
        last += call_user_function(lambda node: bool(node_call_back(node)), node, node=node, role="node_call_back")
        parts[node] = last
    return parts


def _split(gm: GraphModule, parts: Mapping[Node, int]) -> GraphModule:
    return split_module(gm, None, parts.__getitem__, keep_original_order=True, keep_original_node_name=True)


def _with_opaque_toggles(gm: GraphModule, parts: Mapping[Node, int]) -> tuple[GraphModule, dict[Node, int]]:
    """A copy in which toggles are calls of unknown functions, and the part of each copied node.

    The argument of an exit is the name of the node that entered its block, so that no handle crosses a border.
    """
    writer = GraphWriter.like(gm.graph)
    writer.names.reserve(node.name for node in gm.graph.nodes)
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        is_exit = node.op == "call_function" and node.target in _EXIT_OF.values()
        opaque = _OPAQUE.get(node.target) if node.op == "call_function" else None
        swap: Callable[[Node], Any] = attrgetter("name") if is_exit else copies.__getitem__
        copies[node] = writer.copy(node, swap, name=node.name, target=opaque)
    module = module_like(gm, writer.close())
    share_state(gm, module, without=frozenset())
    return module, {copies[node]: part for node, part in parts.items()}


def _repeated(graph: Graph, parts: Mapping[Node, int]) -> list[_Repeated]:
    """What each part repeats, in order."""
    found: list[_Repeated] = []
    modes, last = NOTHING_OPEN, None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if parts[node] != last:
            if found:
                found[-1] = replace(found[-1], exited=modes.blocks[::-1])
            found.append(_Repeated(modes.to_reenter(node)))
            last = parts[node]
        modes = modes.after(node)
    return found


def _write_toggles(graph: Graph, repeated: _Repeated) -> None:
    """Restores the toggles in the graph of a part, and writes those that it repeats."""
    handles: dict[object, Node] = {}
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for toggle in repeated.entered:
            handles[toggle.name] = graph.call_function(toggle.target, toggle.args, dict(toggle.kwargs))  # type: ignore[arg-type]
            copy_meta(toggle.meta, handles[toggle.name].meta, {})
    for node in graph.nodes:
        if isinstance(node.target, _Opaque):
            node.target = node.target.toggle
            if node.target in _EXIT_OF.values():
                node.args = tuple(handles[name] for name in node.args)
                node.kwargs = {keyword: handles[name] for keyword, name in node.kwargs.items()}
            handles[node.name] = node
    with graph.inserting_before(graph.output_node()):
        for toggle in repeated.exited:
            exit_call = graph.call_function(_EXIT_OF[toggle.target], (handles[toggle.name],))
            for exit_node in toggle.users:
                copy_meta(exit_node.meta, exit_call.meta, {})


class _Opaque:
    """Stands for a toggle while a graph is cut; an unknown function may have effects, so it keeps its place."""

    def __init__(self, toggle: Any) -> None:
        self.toggle = toggle
        self.__name__ = toggle.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a stand-in is never called")


_OPAQUE: dict[Any, _Opaque] = {toggle: _Opaque(toggle) for toggle in (*toggles.TOGGLES, toggles.IS_GRAD_ENABLED)}

_EXIT_OF: dict[Any, Callable[..., Any]] = {
    toggles.ENTER_AUTOCAST: toggles.EXIT_AUTOCAST,
    toggles.ENTER_INFERENCE: toggles.EXIT_INFERENCE,
}
