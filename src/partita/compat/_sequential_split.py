"""torch's `sequential_split`: a graph cut in graph order, with its mode toggles left where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita._torch.fx.graph_writer import GraphWriter, copy_meta
from partita._torch.gc_pause import gc_paused
from partita.analysis.modes import has_toggles
from partita.compat._open_modes import NOTHING_OPEN
from partita.compat.split_module import split_module
from partita.errors import CallbackError, OptionError
from partita.program.program import Program
from partita.rewrite.state import module_like, share_state

__all__ = ["sequential_split"]


_EXIT_OF: dict[Any, Callable[..., Any]] = {
    toggles.ENTER_AUTOCAST: toggles.EXIT_AUTOCAST,
    toggles.ENTER_INFERENCE: toggles.EXIT_INFERENCE,
}


@dataclass(frozen=True, slots=True)
class _Repeated:
    """The toggles that a part enters again at its beginning, and those whose blocks it leaves at its end."""

    entered: tuple[Node, ...]
    left: tuple[Node, ...] = ()


@gc_paused()
def sequential_split(gm: GraphModule, node_call_back: Callable[[Node], Node | bool]) -> GraphModule:
    """A new module in which a part begins at every node for which `node_call_back` is true; `gm` is not changed.

    Toggles stay in their parts, so a part switches the mode for the parts after it, as the graph did. A block that is
    open where the graph is cut is left at the end of the part and entered again by the next one.
    """
    if not isinstance(gm, GraphModule):
        raise OptionError(f"sequential_split takes a torch.fx.GraphModule, not {type(gm).__name__}")
    parts = _parts(gm.graph, node_call_back)
    if not has_toggles(gm.graph):
        return _split(gm, parts)
    _ = Program.of(gm).modes  # Raises where toggles have no meaning.
    repeated = _repeated(gm.graph, parts)
    cut = _split(*_with_opaque_toggles(gm, parts))
    for call, repeats in zip(cut.graph.find_nodes(op="call_module"), repeated, strict=True):
        _write_toggles(cut.get_submodule(str(call.target)).graph, repeats)  # type: ignore[arg-type]
    return cut


def _parts(graph: Graph, node_call_back: Callable[[Node], Node | bool]) -> dict[Node, int]:
    """The part of every node, the inputs and the output included: each may begin a part."""
    parts, last = {}, 0
    for node in graph.nodes:
        try:
            last += bool(node_call_back(node))
        except Exception as error:
            raise CallbackError(
                f"node_call_back raised {type(error).__name__} for node {node.name!r}: {error}; nothing was changed"
            ) from error
        parts[node] = last
    return parts


def _split(gm: GraphModule, parts: Mapping[Node, int]) -> GraphModule:
    return split_module(gm, None, parts.__getitem__, keep_original_order=True, keep_original_node_name=True)


def _with_opaque_toggles(gm: GraphModule, parts: Mapping[Node, int]) -> tuple[GraphModule, dict[Node, int]]:
    """A copy in which toggles are calls that nobody knows, and the part of each copied node.

    An exit names the node that entered its block instead of reading it, so that no handle crosses a border.
    """
    writer = GraphWriter(gm.graph._tracer_cls)
    writer.names.reserve(node.name for node in gm.graph.nodes)
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        is_exit = node.op == "call_function" and node.target in _EXIT_OF.values()
        opaque = _OPAQUE.get(node.target) if node.op == "call_function" else None
        swap: Callable[[Node], Any] = _name_of if is_exit else copies.__getitem__
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
                found[-1] = replace(found[-1], left=modes.blocks[::-1])
            found.append(_Repeated(modes.to_enter_again(node)))
            last = parts[node]
        modes = modes.after(node)
    return found


def _write_toggles(graph: Graph, repeated: _Repeated) -> None:
    """Puts the toggles back into the graph of a part, with what it repeats around them."""
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
        for toggle in repeated.left:
            left = graph.call_function(_EXIT_OF[toggle.target], (handles[toggle.name],))
            for exit_node in toggle.users:
                copy_meta(exit_node.meta, left.meta, {})


def _name_of(node: Node) -> str:
    return node.name


class _Opaque:
    """Stands for a toggle while a graph is cut; as a function that nobody knows, it keeps its place."""

    def __init__(self, toggle: Any) -> None:
        self.toggle = toggle
        self.__name__ = toggle.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a stand-in is never called")


_OPAQUE: dict[Any, _Opaque] = {toggle: _Opaque(toggle) for toggle in (*toggles.TOGGLES, toggles.IS_GRAD_ENABLED)}
