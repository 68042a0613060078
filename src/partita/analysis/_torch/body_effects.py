"""Effects of the body of a higher-order operator on recomputation: mutation, RNG use, tensors saved early.

They come from the schemas of the calls inside, or from a closer analysis that annotated the body.
"""

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

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


_KEY = "partita_recompute"


@dataclass(frozen=True, slots=True)
class BodyEffects:
    """The names of nodes that may mutate tensors, whether any node may use the RNG, and what is mutated.

    Inputs are identified by their place, parameters and buffers by their name in the body.
    """

    writers: tuple[str, ...] = ()
    may_use_rng: bool = True
    #: What the body mutates, or other code after it has run.
    written: tuple[int | str, ...] = ()
    #: Whether `written` is complete; if not, mutations are detected at run time, since version counters miss some.
    knows_written: bool = False
    #: Whether an operator mutates a tensor after saving it, so that recomputation must not stop at the last saving.
    saves_before_mutation: bool = False
    #: Whether an operator runs a body of its own, and may trace its backward when it is called.
    may_trace: bool = False

    @property
    def needs_copies(self) -> bool:
        """Whether recomputation needs copies of the original inputs."""
        return bool(self.writers or self.written)


def saves_before_mutation(body: nn.Module) -> bool:
    """Whether a body, or a module inside, calls RReLU in some form: it saves its noise before generating it."""
    for module in body.modules():
        if isinstance(module, nn.RReLU):
            return True
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if "rrelu" in str(getattr(node.target, "__name__", node.target)):
                return True
    return False


def may_trace(body: nn.Module) -> bool:
    """Whether a body, or a graph inside, calls a higher-order operator, such as `scan`, other than Partita's own."""
    graphs = (module.graph for module in body.modules() if isinstance(module, GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any(is_higher_order(target) and not getattr(target, "only_runs_body", False) for target in targets)


def annotate_effects(body: GraphModule, effects: BodyEffects) -> None:
    """Stores effects in the metadata of a body, where they hold until it is edited; copies and pickles keep them.

    They are stored as plain data: pickling drops all other metadata.
    """
    body.meta[_KEY] = (digest_of_body(body), astuple(effects))
    _KNOWN.pop(body, None)


def propagate_effects(body: GraphModule, rewritten: GraphModule) -> None:
    """Copies the annotation of a body to an equivalent one with the same inputs that was made from it."""
    effects = _annotated(body) if body is not rewritten and _KEY in body.meta else None
    if effects is not None:
        names = {id(tensor): name for name, tensor in _named_tensors(rewritten)}
        moved = {name: names.get(id(tensor), name) for name, tensor in _named_tensors(body)}
        written = tuple(moved.get(one, one) if isinstance(one, str) else one for one in effects.written)
        annotate_effects(rewritten, replace(effects, written=written))


def effects_of_body(body: Any) -> BodyEffects | None:
    """The effects of `body`; None where it is no graph, so that it may have any.

    Queried at every call, so the result is cached until code is generated anew: an edited graph runs only then.
    """
    if not isinstance(body, GraphModule) or "forward" in vars(body):
        return None
    code = _code_of(body)
    known = _KNOWN.get(body)
    if known is not None and known[0] == code:
        return known[1]
    effects = _annotated(body) or _analysed(body)
    if not any(map(_awaits_code, body.modules())):
        _KNOWN[body] = (code, effects)
    return effects


#: By body: its code when it was analysed, and the result.
_KNOWN: WeakKeyDictionary[GraphModule, tuple[tuple[object, ...], BodyEffects]] = WeakKeyDictionary()


def _code_of(body: GraphModule) -> tuple[object, ...]:
    """The `forward` functions of a body and the modules inside; torch makes a new function for each edit."""
    if not body._modules:
        return (type(body).forward,)
    return tuple([vars(module).get("forward", type(module).forward) for module in body.modules()])


def _awaits_code(module: nn.Module) -> bool:
    """Whether `forward` is still the function that generates the code, so that edits do not replace it."""
    return isinstance(module, _LazyGraphModule) and module._needs_recompile()


def _annotated(body: GraphModule) -> BodyEffects | None:
    """The annotation of a body, if it was not edited since."""
    digest, effects = body.meta.get(_KEY, (None, ()))
    return BodyEffects(*effects) if digest is not None and digest == digest_of_body(body) else None


def _named_tensors(body: GraphModule) -> Iterator[tuple[str, Tensor]]:
    yield from body.named_parameters()
    yield from body.named_buffers()


def _analysed(body: GraphModule) -> BodyEffects:
    found = {node.name: _effects_of_call(node, body) for node in body.graph.nodes if node.op.startswith("call_")}
    writers = tuple(name for name, effects in found.items() if effects.mutates)
    uses_rng = any(effects.uses_rng for effects in found.values())
    return BodyEffects(writers, uses_rng, saves_before_mutation=saves_before_mutation(body), may_trace=may_trace(body))


def _effects_of_call(node: Node, owner: GraphModule) -> SchemaEffects:
    inside = list(map(effects_of_body, _bodies(node, owner)))
    if not inside:
        return schema_effects(node)
    return SchemaEffects(
        mutates=any(effects is None or effects.writers for effects in inside),
        uses_rng=any(effects is None or effects.may_use_rng for effects in inside),
    )


def _bodies(node: Node, owner: GraphModule) -> Iterator[Any]:
    """The bodies that an operator runs."""
    if node.op == "call_function" and not isinstance(node.target, OpOverload):
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                body = _attribute(owner, str(read.target))
                if isinstance(body, nn.Module):
                    yield body


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


# Effects of a call according to its schema: mutation and RNG use.


class SchemaEffects(NamedTuple):
    """Whether a call may mutate existing tensors, and whether it may use the RNG."""

    mutates: bool
    uses_rng: bool


def schema_effects(node: Node) -> SchemaEffects:
    """The effects of a call; a module, and a function without a schema, may have both."""
    if node.target in _PLAIN or _is_check(node.target):
        return SchemaEffects(mutates=False, uses_rng=False)
    signatures = [signature for signature in _signatures(node) if _may_be_called(signature, node)]
    if not signatures:
        return SchemaEffects(mutates=True, uses_rng=True)
    mutates = node.kwargs.get("out") is not None or any(map(_mutates, signatures))
    return SchemaEffects(
        mutates, any(signature.uses_rng or _may_use_rng_inside(signature, node.target) for signature in signatures)
    )


def _signatures(node: Node) -> tuple[Signature, ...]:
    if node.op == "call_method":
        return signatures_of_method(str(node.target))
    return () if node.op == "call_module" else signatures_of(node.target)


def _may_be_called(signature: Signature, node: Node) -> bool:
    """Whether a call may reach this overload; an `out` overload is only reached by passing that argument."""
    if not signature.is_out or isinstance(node.target, OpOverload):
        return True
    names = ("out", *(argument.name for argument in signature.arguments if argument.mutated))
    return any(node.kwargs.get(name) is not None for name in names)


def _mutates(signature: Signature) -> bool:
    return any(argument.mutated or argument.name in _STATISTICS for argument in signature.arguments)


def _may_use_rng_inside(signature: Signature, target: Any) -> bool:
    """Whether an operator may call others that use the RNG, which its own tags do not say: dropout in attention."""
    if not signature.name.startswith("aten::"):
        return True  # An operator of another library may use the RNG without the tag.
    return _is_composite(target.name()) if isinstance(target, OpOverload) else _has_composite(signature.name)


@cache
def _has_composite(name: str) -> bool:
    """Whether any overload of an operator of torch is composite."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return any(_is_composite(getattr(packet, overload).name()) for overload in packet.overloads())


def _is_composite(name: str) -> bool:
    # TorchScript has overloads for Python numbers, of which the dispatcher knows nothing.
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _is_check(target: Any) -> bool:
    return isinstance(target, OpOverload) and "assert" in target.name()


#: What the norms of torch mutate in training, without an annotation in their schemas.
_STATISTICS = ("running_mean", "running_var")

#: Functions of Python without effects. In-place ones have a second name in `operator`, so all are listed.
_PLAIN = frozenset(
    getattr(operator, name)
    for name in (
        *("abs", "add", "and_", "floordiv", "index", "inv", "invert", "lshift", "matmul", "mod", "mul", "neg", "or_"),
        *("pos", "pow", "rshift", "sub", "truediv", "xor"),
        *("eq", "ge", "gt", "is_", "is_not", "le", "lt", "ne", "not_", "truth"),
        *("concat", "contains", "countOf", "getitem", "indexOf", "length_hint"),
    )
)
