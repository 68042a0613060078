"""The behaviour of calls that run bodies: graph modules, and the operators that are given some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.export_hooks import has_only_export_hooks
from partita._torch.schemas import flattens_inputs, is_higher_order, signatures_of
from partita.graphs.aliasing import NodeBehaviours, storages_of, written_classes
from partita.graphs.attributes import find
from partita.graphs.behaviour_modules import is_check
from partita.graphs.behaviour_operators import rule_of_operator
from partita.graphs.behaviour_terms import ALIASING, EVERY, PURE, UNKNOWN, Behaviour, Slot, merged
from partita.graphs.faithful import runs_its_graph
from partita.graphs.index import Index
from partita.graphs.modes import AMBIENT, modes_of

__all__ = ["behaviour_of_body", "behaviour_of_call"]


class ActingNodes(NodeBehaviours, Protocol):
    """The behaviour of the nodes of one body."""

    def acting(self, graph: Graph) -> dict[Node, Behaviour]: ...


def behaviour_of_body(body: GraphModule, behaviours: ActingNodes) -> Behaviour:
    """What a call of `body` may do, its slots by the place of each placeholder.

    The module of an exported program checks its own inputs. That can raise, as any operator can that is given what it
    does not take, and is no act of its own.
    """
    is_exported = has_only_export_hooks(body)
    if not is_exported and not runs_its_graph(body):
        return UNKNOWN
    index = Index(body.graph)
    acting = behaviours.acting(body.graph)
    if is_exported:
        acting = {node: told for node, told in acting.items() if not _checks_inputs(node, body)}
    storages = storages_of(index, behaviours, acting)
    written = set().union(*written_classes(index, storages, acting).values())
    returned = {storages.find(i) for i in index.inputs(len(index) - 1)}
    inside = merged(acting.values())
    return replace(
        inside,
        writes=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in written}),
        aliases=_slots_of_inputs(index, {i for i, _ in _placeholders(index) if storages.find(i) in returned}),
        state_writes=tuple(
            {id(tensor): tensor for tensor in (*storages.tensors_in(written), *inside.state_writes)}.values()
        ),
        shares_state=inside.unknown or any(True for _ in storages.tensors_in(returned)),
        waits=False,
        # A body that leaves a mode behind changes how every later call is carried out.
        fences=inside.fences or modes_of(index).final != AMBIENT,
    )


def behaviour_of_call(
    node: Node, modules: nn.Module | Sequence[nn.Module], of_module: Callable[[nn.Module], Behaviour]
) -> Behaviour:
    """What the call `node` of these modules may do, its slots by the place of each argument."""
    if isinstance(modules, nn.Module):
        return of_module(modules)
    if getattr(node.target, "__name__", "") == _DELEGATE:
        return Behaviour(impure=True)
    if not modules:
        return _of_bare_operator(node)
    return merged(_as_seen_by_operator(node, body, of_module(body)) for body in modules)


def _checks_inputs(node: Node, body: GraphModule) -> bool:
    called = find(body, str(node.target)) if node.op == "call_module" else None
    return isinstance(called, nn.Module) and is_check(called)


def _placeholders(index: Index) -> Iterator[tuple[int, Node]]:
    return ((i, node) for i, node in enumerate(index.nodes) if node.op == "placeholder")


def _slots_of_inputs(index: Index, wanted: set[int]) -> tuple[Slot, ...]:
    """The slots of the placeholders in `wanted`; all at once where arguments and placeholders do not match."""
    if not wanted:
        return ()
    if flattens_inputs(index.graph) or any(str(node.target).startswith("*") for _, node in _placeholders(index)):
        return (EVERY,)
    return tuple((k, str(node.target)) for k, (i, node) in enumerate(_placeholders(index)) if i in wanted)


def _as_seen_by_operator(node: Node, body: nn.Module, told: Behaviour) -> Behaviour:
    """`told`, with the inputs of the body found among the operands of the operator."""
    if told.unknown or not isinstance(body, GraphModule):
        return UNKNOWN
    places = _operand_places(node, sum(n.op == "placeholder" for n in body.graph.nodes))

    def seen(slots: Iterable[Slot]) -> tuple[Slot, ...]:
        if places is None or EVERY in slots:
            return (EVERY,) if slots else ()
        return tuple(dict.fromkeys((places[position], "") for position, _ in slots))

    return replace(told, writes=seen(told.writes), aliases=seen(told.aliases))


def _operand_places(node: Node, count: int) -> list[int] | None:
    """The argument in which each of `count` inputs of the body travels; None where that cannot be told."""
    leaves = [(i, leaf) for i, given in enumerate(node.args) for leaf in _leaves(given)]
    last_body = max((i for i, leaf in leaves if isinstance(leaf, Node) and _reads_body(leaf)), default=-1)
    # `invoke_subgraph` names its body in a string between body and operands.
    places = [i for i, leaf in leaves if i > last_body and not isinstance(leaf, str)]
    return places if len(places) == count else None


def _reads_body(node: Node) -> bool:
    """Whether a node reads a body, and no tensor, from the module that owns the graph."""
    root = node.graph.owning_module
    value = find(root, str(node.target)) if node.op == "get_attr" and root is not None else None
    return isinstance(value, nn.Module)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _of_bare_operator(node: Node) -> Behaviour:
    """Operators that are given an operator, or nothing, to run."""
    name = getattr(node.target, "__name__", "")
    if name in _KNOWN:
        return _KNOWN[name]
    if name not in _RUNS_OPERATOR | _FUNCTIONAL:
        return UNKNOWN
    inner = [a for a in node.args if callable(a) and not isinstance(a, Node)]
    if len(inner) != 1 or is_higher_order(inner[0]):
        return PURE if name in _FUNCTIONAL else UNKNOWN
    told = rule_of_operator(signatures_of(inner[0])).usual
    if name in _FUNCTIONAL:  # It writes copies and gives them back.
        return replace(told, writes=(), aliases=(), state_writes=())
    ordered = Behaviour(draws="rng" in name, impure=name == "with_effects")
    return merged((replace(told, writes=(EVERY,) if told.writes else (), aliases=(EVERY,)), ordered))


#: ExecuTorch's operator, which runs what a delegate made of a functional graph: it gives new tensors and writes none of
#: its arguments. It may own buffers, so that calls keep their order.
_DELEGATE = "executorch_call_delegate"
_FUNCTIONAL = frozenset(
    ("auto_functionalized", "auto_functionalized_v2", "out_dtype", "triton_kernel_wrapper_functional")
)
_RUNS_OPERATOR = frozenset(
    ("graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state", "with_effects")
)
_KNOWN = {
    "print": Behaviour(impure=True),
    "_export_tracepoint": replace(ALIASING, impure=True),
    "triton_kernel_wrapper_mutation": Behaviour(writes=(EVERY,)),
}
