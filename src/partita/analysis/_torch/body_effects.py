from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from partita._torch.fx.structural_hash import digest_of_body
from partita._torch.operators.schemas import Signature, is_higher_order, signatures_of, signatures_of_method

__all__ = [
    "BodyEffects",
    "annotate_effects",
    "effects_of_body",
    "may_trace",
    "propagate_effects",
    "saves_before_mutation",
    "schema_effects",
]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# What a body may do beside computing, as far as recomputing it is concerned.


_KEY = "partita_recompute"


@dataclass(frozen=True, slots=True)
class BodyEffects:
    """The names of nodes that may write to tensors, whether anything may draw, and what is written.

    Inputs are told by their place, parameters and buffers by their name in the body.
    """

    writers: tuple[str, ...] = ()
    may_use_rng: bool = True
    #: By the body, or by others when it has run.
    written: tuple[int | str, ...] = ()
    #: Whether all that the body writes is told; if not, it is found out, since torch does not count every write.
    knows_written: bool = False
    #: Whether an operator saves what it only writes then, so that a second run must not end with the last saving.
    saves_before_mutation: bool = False
    #: Whether an operator runs a body of its own, of which it may trace the backward when it is called.
    may_trace: bool = False

    @property
    def needs_copies(self) -> bool:
        """Whether the second run needs copies of what the first was given."""
        return bool(self.writers or self.written)


def saves_before_mutation(body: nn.Module) -> bool:
    """Whether a body, or a module inside, calls RReLU in some form: it saves its noise before it has drawn it."""
    for module in body.modules():
        if isinstance(module, nn.RReLU):
            return True
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if "rrelu" in str(getattr(node.target, "__name__", node.target)):
                return True
    return False


def may_trace(body: nn.Module) -> bool:
    """Whether a body, or a graph inside, calls an operator such as `scan` that runs a body, and is none of ours."""
    graphs = (module.graph for module in body.modules() if isinstance(module, GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any(is_higher_order(target) and not getattr(target, "only_runs_body", False) for target in targets)


def annotate_effects(body: GraphModule, facts: BodyEffects) -> None:
    """Keeps what a closer look has found with the body, as long as that is not edited; copies and pickles have it too.

    As plain data: a pickle leaves out of the metadata what is anything else.
    """
    body.meta[_KEY] = (digest_of_body(body), astuple(facts))
    _KNOWN.pop(body, None)


def propagate_effects(body: GraphModule, rewritten: GraphModule) -> None:
    """Notes what was noted of a body for another one that was made from it, is called like it, and means the same."""
    facts = _noted(body) if body is not rewritten and _KEY in body.meta else None
    if facts is not None:
        names = {id(tensor): name for name, tensor in _named_tensors(rewritten)}
        moved = {name: names.get(id(tensor), name) for name, tensor in _named_tensors(body)}
        written = tuple(moved.get(one, one) if isinstance(one, str) else one for one in facts.written)
        annotate_effects(rewritten, replace(facts, written=written))


def effects_of_body(body: Any) -> BodyEffects | None:
    """What is known of `body`; None where it is no graph, so that it may do anything.

    Asked at every call, so the answer is kept until code is generated anew: an edited graph runs only then.
    """
    if not isinstance(body, GraphModule) or "forward" in vars(body):
        return None
    code = _code_of(body)
    known = _KNOWN.get(body)
    if known is not None and known[0] == code:
        return known[1]
    facts = _noted(body) or _read(body)
    if not any(map(_waits_for_code, body.modules())):
        _KNOWN[body] = (code, facts)
    return facts


#: By body: the code that was looked at, and what was found.
_KNOWN: WeakKeyDictionary[GraphModule, tuple[tuple[object, ...], BodyEffects]] = WeakKeyDictionary()


def _code_of(body: GraphModule) -> tuple[object, ...]:
    """What runs when the body is called, and in the modules inside; torch makes a new function for each edit."""
    if not body._modules:
        return (type(body).forward,)
    return tuple([vars(module).get("forward", type(module).forward) for module in body.modules()])


def _waits_for_code(module: nn.Module) -> bool:
    """Whether edits go unseen since the function that will make the code is the same before and after."""
    return isinstance(module, _LazyGraphModule) and module._needs_recompile()


def _noted(body: GraphModule) -> BodyEffects | None:
    """What was noted of the body, if it is still what it was then."""
    digest, facts = body.meta.get(_KEY, (None, ()))
    return BodyEffects(*facts) if digest is not None and digest == digest_of_body(body) else None


def _named_tensors(body: GraphModule) -> Iterator[tuple[str, Tensor]]:
    yield from body.named_parameters()
    yield from body.named_buffers()


def _read(body: GraphModule) -> BodyEffects:
    found = {node.name: _acts(node, body) for node in body.graph.nodes if node.op.startswith("call_")}
    writers = tuple(name for name, acts in found.items() if acts.writes)
    draws = any(acts.draws for acts in found.values())
    return BodyEffects(writers, draws, saves_before_mutation=saves_before_mutation(body), may_trace=may_trace(body))


def _acts(node: Node, owner: GraphModule) -> SchemaEffects:
    inside = list(map(effects_of_body, _bodies(node, owner)))
    if not inside:
        return schema_effects(node)
    return SchemaEffects(
        writes=any(facts is None or facts.writers for facts in inside),
        draws=any(facts is None or facts.may_use_rng for facts in inside),
    )


def _bodies(node: Node, owner: GraphModule) -> Iterator[Any]:
    """The bodies that an operator runs."""
    if node.op == "call_function" and not isinstance(node.target, OpOverload):
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                held = _held(owner, str(given.target))
                if isinstance(held, nn.Module):
                    yield held


def _held(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


# What a call in a graph may do beside computing, from what torch declares alone: write to tensors, and draw.


class SchemaEffects(NamedTuple):
    """Whether a call may write to what was there before, and whether it may draw random numbers."""

    writes: bool
    draws: bool


def schema_effects(node: Node) -> SchemaEffects:
    """What a call may do; a module, and a function without a schema, may do both."""
    if node.target in _PLAIN or _is_check(node.target):
        return SchemaEffects(writes=False, draws=False)
    signatures = [signature for signature in _signatures(node) if _may_be_meant(signature, node)]
    if not signatures:
        return SchemaEffects(writes=True, draws=True)
    writes = node.kwargs.get("out") is not None or any(map(_writes, signatures))
    return SchemaEffects(
        writes, any(signature.draws or _may_hide_a_draw(signature, node.target) for signature in signatures)
    )


def _signatures(node: Node) -> tuple[Signature, ...]:
    if node.op == "call_method":
        return signatures_of_method(str(node.target))
    return () if node.op == "call_module" else signatures_of(node.target)


def _may_be_meant(signature: Signature, node: Node) -> bool:
    """Whether a call may reach this overload; those that write into `out` are reached by what is given for it."""
    if not signature.is_out or isinstance(node.target, OpOverload):
        return True
    names = ("out", *(argument.name for argument in signature.arguments if argument.written))
    return any(node.kwargs.get(name) is not None for name in names)


def _writes(signature: Signature) -> bool:
    return any(argument.written or argument.name in _STATISTICS for argument in signature.arguments)


def _may_hide_a_draw(signature: Signature, target: Any) -> bool:
    """Whether an operator's own tags do not speak for the operators that it calls: dropout in attention, say."""
    if not signature.name.startswith("aten::"):
        return True  # An operator of somebody else's may draw without saying so.
    return _is_composite(target.name()) if isinstance(target, OpOverload) else _has_composite(signature.name)


@cache
def _has_composite(name: str) -> bool:
    """Whether any overload of an operator of torch's is one."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return any(_is_composite(getattr(packet, overload).name()) for overload in packet.overloads())


def _is_composite(name: str) -> bool:
    # TorchScript has overloads for Python numbers, of which the dispatcher knows nothing.
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _is_check(target: Any) -> bool:
    return isinstance(target, OpOverload) and "assert" in target.name()


#: What the norms of torch write in training, which their schemas do not say.
_STATISTICS = ("running_mean", "running_var")

#: Functions of Python that only compute. Those that write in place have a second name in `operator`, so all are listed.
_PLAIN = frozenset(
    getattr(operator, name)
    for name in (
        *("abs", "add", "and_", "floordiv", "index", "inv", "invert", "lshift", "matmul", "mod", "mul", "neg", "or_"),
        *("pos", "pow", "rshift", "sub", "truediv", "xor"),
        *("eq", "ge", "gt", "is_", "is_not", "le", "lt", "ne", "not_", "truth"),
        *("concat", "contains", "countOf", "getitem", "indexOf", "length_hint"),
    )
)
