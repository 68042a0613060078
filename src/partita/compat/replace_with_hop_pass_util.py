"""A drop-in replacement for `torch._export.passes.replace_with_hop_pass_util`: helpers for passes that wrap regions.

A pass cuts a graph with `compat.utils.sequential_split`, decides for each part, and does so in the bodies of operators
too. torch's two passes are written with these; ours are not, and these are for passes of users.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita._torch.fx.graph_writer import copy_meta
from partita.analysis.modes import AMBIENT, Grad, Mode, only_argument, traced_grad
from partita.analysis.nodes import bodies_read, find, returned_by
from partita.compat._fused_groups import checked_module
from partita.compat.utils import node_replace_
from partita.errors import OptionError, SignatureError
from partita.program.exported import check_signature, following
from partita.program.mode_runs import ModeRun
from partita.program.program import Program
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes

__all__ = [
    "_replace_with_hop_helper",
    "_replace_with_hop_pass_helper",
    "_sequential_split_and_maybe_inline_subgraphs_helper",
]


Signature: TypeAlias = ExportGraphSignature | None

#: Cuts a module, and inlines or wraps each part.
Treated: TypeAlias = Callable[[GraphModule, Signature], tuple[GraphModule, Signature]]


class _CallError(OptionError, AssertionError):
    """A node that cannot become a call of an operator: it calls no part of a graph module."""


class _OutputsError(SignatureError, AssertionError):
    """A signature has another number of outputs than the graph."""


def _replace_with_hop_pass_helper(
    gm: GraphModule, graph_signature: Signature, sequential_split_and_maybe_inline_subgraphs: Treated
) -> tuple[GraphModule, Signature]:
    """The result of the function for `gm`, with the bodies of its operators, at any depth, treated alike in place."""
    new_gm, new_signature = sequential_split_and_maybe_inline_subgraphs(gm, graph_signature)
    reads = bodies_read(new_gm, new_gm.graph.find_nodes(op="get_attr"))
    for path, body in {str(read.target): body for read, body in reads}.items():
        inner, _ = _replace_with_hop_pass_helper(body, None, sequential_split_and_maybe_inline_subgraphs)
        owner, _, name = path.rpartition(".")
        setattr(new_gm.get_submodule(owner), name, inner)
    new_gm.recompile()
    new_gm.graph.lint()
    return new_gm, new_signature


def _sequential_split_and_maybe_inline_subgraphs_helper(
    new_gm: GraphModule, graph_signature: Signature, maybe_inline_or_replace_with_hop: Callable[[Node], Any]
) -> tuple[GraphModule, Signature]:
    """`new_gm` after the function was called with each node that calls a part; it works in place.

    The signature is a copy with the new names of the outputs.
    """
    if graph_signature is not None:
        _check_outputs(new_gm, graph_signature)
    for call in new_gm.graph.find_nodes(op="call_module"):
        maybe_inline_or_replace_with_hop(call)
    new_gm.recompile()
    new_gm.graph.lint()
    return new_gm, None if graph_signature is None else following(graph_signature, new_gm.graph)


def _replace_with_hop_helper(node: Node, enter_block_node: Node, wrap_hoo: Any) -> None:
    """Replaces the call of a part by a call of `wrap_hoo`, in place: the arguments of the entering node, then the body.

    A part that returns one value returns a tuple of it afterwards, as operators do. The getitems of the call have the
    names and metadata of their items.
    """
    part = _part_of(node)
    if enter_block_node.kwargs or node.kwargs:
        keyed = enter_block_node if enter_block_node.kwargs else node
        raise _CallError(f"node {keyed.name!r} has arguments by keyword, and the body comes after them; give positions")
    output = next(iter(part.graph.find_nodes(op="output")), None)
    returned = output.args[0] if output is not None and output.args else ()
    if not isinstance(returned, Node | tuple | list):
        raise _CallError(f"part {node.target!r} returns a {type(returned).__name__}; let it return nodes")
    values = (returned,) if isinstance(returned, Node) else tuple(returned)
    graph, stack = node.graph, enter_block_node.meta.get("nn_module_stack", {})
    with graph.inserting_before(node):
        body = graph.get_attr(str(node.target))
        call = graph.call_function(wrap_hoo, (*enter_block_node.args, body, *node.args))
        body.meta["nn_module_stack"], call.meta["nn_module_stack"] = dict(stack), dict(stack)
        call.meta["torch_fn"] = (wrap_hoo.__name__, f"{type(wrap_hoo).__name__}.{wrap_hoo.__name__}")
        if all(isinstance(value, Node) and "val" in value.meta for value in values):
            call.meta["val"] = tuple(value.meta["val"] for value in values)
        if not isinstance(returned, Node):
            node_replace_(node, call)
            _name_items(call, values)
            return
        item = graph.create_node("call_function", operator.getitem, (call, 0), name=returned.name)
    assert output is not None
    output.args = ((returned,),)
    part.recompile()
    copy_meta(returned.meta, item.meta, {})
    node_replace_(node, item)


def _name_items(call: Node, values: tuple[Any, ...]) -> None:
    """Names the getitems of a call after their items, and copies their metadata."""
    for user in call.users:
        at = user.args[1] if user.target is operator.getitem else None
        value = values[at] if isinstance(at, int) else None
        if isinstance(value, Node):
            user._rename(value.name)
            user.meta.clear()
            copy_meta(value.meta, user.meta, {})


def _part_of(node: Node) -> GraphModule:
    root = node.graph.owning_module
    part = find(root, str(node.target)) if node.op == "call_module" and root is not None else None
    if not isinstance(part, GraphModule):
        raise _CallError(f"node {node.name!r} calls no graph module of the module around it; cut the graph first")
    return part


def _check_outputs(module: GraphModule, signature: ExportGraphSignature) -> None:
    found = len(returned_by(module.graph))
    if found != len(signature.output_specs):
        raise _OutputsError(
            f"the graph has {found} outputs and its signature {len(signature.output_specs)}; give the signature that "
            "belongs to this graph"
        )


#: For each node of a graph, whether torch starts a new submodule there.
Openings: TypeAlias = Callable[[Sequence[Node]], Sequence[bool]]


def replace_with_operators(
    gm: GraphModule, graph_signature: Signature, *, kind: type, openings: Openings
) -> tuple[GraphModule, Signature]:
    """A new module with modes of one kind as operators, and its signature; the arguments themselves if it has none."""
    checked_module(gm, "the pass takes")
    if graph_signature is not None:
        check_signature(gm.graph, graph_signature)

    def names(program: Program, runs: Sequence[ModeRun]) -> Sequence[str]:
        """A body has the number of the submodule that torch would have cut there."""
        pieces = list(accumulate(map(int, openings(program.index.nodes))))
        return [f"submod_{pieces[run.numbers[0]]}" for run in runs]

    # The autocast pass keeps grad modes, so there the mode of the caller makes no difference.
    program = Program(gm, caller=_caller(gm) if kind is Grad else AMBIENT)
    style = WrapStyle("torch", frozenset((kind,)), names, named_by_operator=True, passes_symbols=False)
    result = wrap_modes(program, style)
    if result is program:
        return gm, graph_signature
    module = result.graph_module
    module.recompile()
    module.graph.lint()
    return module, None if graph_signature is None else following(graph_signature, module.graph)


def _caller(gm: GraphModule) -> Mode:
    """The assumed grad mode of the caller, relative to which toggles are redundant.

    Torch takes the mode in which the pass runs; what counts is how the program will be called, usually with gradients.
    A graph that enables gradients and ends with them disabled was traced under no_grad, where torch.export runs the
    pass as well. Run in another mode, or with toggles that are not paired, all of them are kept.
    """
    found = gm.graph.find_nodes(op="call_function", target=toggles.SET_GRAD)
    values = [only_argument(node, "enabled") for node in found]
    if not values:  # Bodies may have some.
        return AMBIENT if traced_grad(gm) is False else Mode(grad=True)
    if True not in values or values[-1] is not False:
        return Mode(grad=True)
    return AMBIENT if torch.is_grad_enabled() or len(values) % 2 else Mode(grad=False)
