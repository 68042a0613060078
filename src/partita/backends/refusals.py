"""Which nodes compilers that trace with fake tensors refuse, and why, in a few words each."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.compile_context import MISCOMPUTED, loses_dropout
from partita._torch.functorch import is_inside_transform
from partita._torch.operator_schemas import base_name, has_registered_effect, is_higher_order, registers_hook
from partita._torch.toggles import TOGGLES
from partita.analysis.effects.functions import rule_of_function, rule_of_method
from partita.analysis.effects.modules import effects_of_module
from partita.analysis.effects.terms import nodes_in
from partita.analysis.nodes import find, modules_in, value_of
from partita.backends._torch.support import (
    has_meta_kernel,
    is_operator,
    name_of_operator,
    size_depends_on_data,
    value_depends_on_data,
)
from partita.program.program import Program

NO_META_KERNEL = "no meta kernel"
SIZE_DEPENDS_ON_DATA = "size depends on data"
VALUE_DEPENDS_ON_DATA = "value depends on data"
LEAVES_TORCH = "exposes data to Python"

# A trace keeps the results of these, and loses their side effects.
SIDE_EFFECT = "side effect"
UNKNOWN_FUNCTION = "unknown Python function"
UNKNOWN_METHOD = "unknown method"
UNKNOWN_MODULE = "unknown module"

SPARSE = "sparse tensor"
QUANTIZED = "quantized tensor"
MKLDNN = "mkldnn tensor"
NESTED = "nested tensor"
CPLUSPLUS_OBJECT = "object of a C++ class"

AUTOGRAD = "autograd inside the graph"
HOOK = "hook, which gets the sum of all gradients of its tensor"
TRANSFORM = "torch.func transform"
INSIDE_TRANSFORM = "inside a torch.func transform"
GENERATOR = "uses its own random number generator"
IN_PLACE_COLLECTIVE = "in-place collective"

# Decompositions (torch 2.13) omit the dropout between layers of recurrent networks.
DROPOUT = "dropout that a trace loses"
# AOTAutograd (torch 2.13) saves a None for the backward of oneDNN's kernel, and then refuses to run it.
LSTM = "lstm: its backward fails when traced"
# The decomposition (torch 2.13) reads classes behind the first -1 of a row too.
MULTILABEL = "multilabel_margin_loss: a trace computes another value"
# Decompositions (torch 2.13) into operators that do not round as the kernel of eager mode does.
OTHER_BITS = "a trace computes it by other operators, which round differently"

FUSED_ADAM = "fused adam is not supported yet"
FOREACH_ADDITION = "scalar foreach addition is not supported yet"
# A pattern of torch 2.13 for `x[torch.randperm(n)[:k]]` raises where nothing is sliced off.
RANDPERM = "randperm: Inductor fails where it is an index"
ALIASED_FOREACH = "an in-place foreach whose tensors may share memory: a trace would mutate it once"
SHARES_MEMORY = "its results share memory, which a trace does not see"
RESHAPES = "reshapes a tensor in place"
OWN_BACKWARD = "an autograd function whose result is an argument or a view of it: a trace may lose its backward"
SWAPS = "copies an input into another, and both are mutated"


def refusal_by_tracing(node: Node) -> str | None:
    """Why a trace with fake tensors fails on `node`, or would lose one of its effects."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    by_name = _HIDDEN.get(_name_called(node))
    reason = by_name or _refusal_of_call(node) or refusal_of_values(node)
    return INSIDE_TRANSFORM if reason is None and is_inside_transform(node) else reason


def refusal_of_other_bits(node: Node) -> str | None:
    """Why a trace of `node`, run eagerly, has other bits than eager mode."""
    reason = _refusal_of_own_bits(node)
    if reason is not None:
        return reason
    reads = (one for one in (node, *node.all_input_nodes) if one.op in ("call_module", "get_attr"))
    bodies = (body for one in reads if isinstance(body := _named(one), nn.Module))
    # These include the bodies inside a body; to follow their calls too would take time exponential in the nesting.
    for module in (module for body in bodies for module in modules_in(body)):
        if isinstance(module, nn.Softshrink | nn.MultiMarginLoss):
            return OTHER_BITS
        if isinstance(module, nn.Upsample) and not module.mode.startswith("nearest"):
            return OTHER_BITS
        if isinstance(module, GraphModule) and any(map(_refusal_of_own_bits, module.graph.nodes)):
            return f"in its body: {OTHER_BITS}"
    return None


def _refusal_of_own_bits(node: Node) -> str | None:
    """Why a trace of `node` has other bits, whatever bodies it runs."""
    name = _name_called(node)
    if name in _ROUNDING_DIFFERENTLY:
        return OTHER_BITS
    if name in _PRODUCTS and len(node.args) > 1:
        # A vector times several matrices is one product of matrices in eager mode, and several in a trace.
        dims = [value.dim() if isinstance(value := _value(one), Tensor) else None for one in node.args[:2]]
        return OTHER_BITS if dims[0] == 1 and dims[1] is not None and dims[1] > 2 else None
    if name in ("interpolate", "upsample"):
        mode = node.kwargs.get("mode", node.args[3] if len(node.args) > 3 else "nearest")
        return None if isinstance(mode, str) and mode.startswith("nearest") else OTHER_BITS
    return None


def _value(argument: object) -> object:
    return value_of(argument) if isinstance(argument, Node) else argument


_PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__"))
_ROUNDING_DIFFERENTLY = frozenset(
    (
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
        *("upsample_bilinear", "softshrink", "multi_margin_loss"),
    )
)


def refusal_by_inductor(node: Node) -> str | None:
    """Why Inductor does not support `node`."""
    reason = _NOT_YET.get(node.target) if is_operator(node.target) else None
    if node.op == "call_function" and _name_called(node) == "randperm":
        reason = RANDPERM
    if reason is None and _name_called(node) == "copy_" and _copies_mutated_input(node):
        reason = SWAPS
    return reason or refusal_by_tracing(node)


def _copies_mutated_input(node: Node) -> bool:
    """Whether an input gets the plain value of another input that is mutated too, as in a swap of two.

    Inductor (torch 2.13) drops the copy in between, and then reads the other input after its mutation.
    """
    target, source = (_source_of_copies(value) if isinstance(value, Node) else None for value in node.args[:2])
    if source is None or source is target or source.op not in ("placeholder", "get_attr"):
        return False
    reads, seen = [source], {source}
    while reads:
        for user in reads.pop().users:
            name = _name_called(user)
            is_first = bool(user.args) and user.args[0] in seen
            if is_first and name.endswith("_") and not name.endswith("__"):
                return True
            if is_first and name in _VIEWS_OR_COPIES and user not in seen:
                seen.add(user)
                reads.append(user)
    return False


def _source_of_copies(node: Node) -> Node:
    while _name_called(node) in _VIEWS_OR_COPIES and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


_VIEWS_OR_COPIES = frozenset(
    ("alias", "clone", "contiguous", "detach", "float", "reshape", "to", "_to_copy", "view", "view_as")
)


def reshapes_in_place(node: Node) -> bool:
    """Whether a node changes the shape or the strides of a tensor in place."""
    return _HIDDEN.get(_name_called(node)) == RESHAPES


def aliases_with_own_backward(node: Node) -> bool:
    """Whether a node calls an autograd function that mutates an argument, or returns a view of one.

    AOTAutograd (torch 2.13) makes aliases of inputs and of other outputs anew, behind the graph and by views alone.
    """
    if node.op != "call_function" or not is_higher_order(node.target) or _name_called(node) != _AUTOGRAD_FUNCTION:
        return False
    forward = _named(node.all_input_nodes[0]) if node.all_input_nodes else None
    if not isinstance(forward, GraphModule):
        return True
    program = Program(forward)
    index, storages = program.index, program.calls.storages
    inputs = {storages.find(index.number[each]) for each in forward.graph.find_nodes(op="placeholder")}
    results = (storages.find(number) for number in index.inputs(len(index) - 1))
    return bool(program.effects.mutated_inputs) or not inputs.isdisjoint(results)


_AUTOGRAD_FUNCTION = "autograd_function_apply"


def _name_called(node: Node) -> str:
    """The name of the function or method that a node calls, without overload."""
    if isinstance(node.target, str):
        return node.target if node.op == "call_method" else ""
    return base_name(node.target)


#: What functionalization (torch 2.13) loses: aliasing that schemas do not declare, and in-place reshapes. What its
#: decompositions get wrong.
_HIDDEN = {
    **dict.fromkeys(("set_", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"), SHARES_MEMORY),
    **dict.fromkeys(("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_"), RESHAPES),
    **dict.fromkeys(("resize_", "resize_as_", "unsqueeze_"), RESHAPES),
    **dict.fromkeys(MISCOMPUTED, MULTILABEL),
}


def _refusal_of_call(node: Node) -> str | None:
    if node.op == "call_method":
        return refusal_of_method(node)
    if node.op == "call_module":
        module = _named(node)
        return _refusal_of_body(module) if isinstance(module, nn.Module) else UNKNOWN_MODULE
    if is_operator(node.target):
        return refusal_of_operator(node)
    if is_higher_order(node.target):
        return refusal_of_higher_order(node)
    return None if node.target in TOGGLES else refusal_of_function(node)


def _overloads(packet: str, *names: str) -> list[Any]:
    found = getattr(torch.ops.aten, packet, None)
    return [getattr(found, name) for name in names or found.overloads()] if found is not None else []


_NOT_YET: dict[Any, str] = {
    **{
        overload: FUSED_ADAM
        for packet in ("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
        for overload in _overloads(packet)
    },
    **{
        overload: FOREACH_ADDITION
        for packet in ("_foreach_add", "_foreach_add_")
        for overload in _overloads(packet, "Scalar")
    },
}


# Python functions and methods.


def refusal_of_function(node: Node) -> str | None:
    """Why a call of a Python function is refused: a trace keeps its result, and loses its side effects."""
    target = node.target
    assert callable(target)
    behaviour = rule_of_function(target).usual
    name = getattr(target, "__name__", "")
    if target is operator.getitem:
        return SIZE_DEPENDS_ON_DATA if is_mask_among(node.args[1:]) else None
    if target is getattr:
        return AUTOGRAD if node.args[1:2] in (("grad",), ("grad_fn",)) else None
    if behaviour.fences:
        module = getattr(target, "__module__", None) or ""
        return TRANSFORM if "functorch" in module else AUTOGRAD
    if behaviour.unknown and target not in _IN_PLACE_OPERATORS:
        return UNKNOWN_FUNCTION
    if behaviour.impure and target not in _IN_PLACE_OPERATORS:
        return SIDE_EFFECT
    return _refusal_by_name(node, name)


def refusal_of_method(node: Node) -> str | None:
    """Why a call of a method is refused."""
    name = str(node.target)
    if name in _AUTOGRAD:
        return AUTOGRAD
    if name in _EXPOSING_DATA:
        return LEAVES_TORCH
    if rule_of_method(name).usual.unknown:
        return UNKNOWN_METHOD
    if name == "__getitem__":
        return SIZE_DEPENDS_ON_DATA if is_mask_among(node.args[1:]) else None
    return _refusal_by_name(node, name)


def _refusal_by_name(node: Node, name: str) -> str | None:
    if name in _SIZE_FROM_DATA or (name == "where" and len(node.args) + len(node.kwargs) == 1):
        return SIZE_DEPENDS_ON_DATA
    if name == "lstm":
        return LSTM
    if node.op == "call_function" and loses_dropout(node.target, node.args, node.kwargs):
        return DROPOUT
    if name in VALUE_FROM_DATA:
        return VALUE_DEPENDS_ON_DATA
    for word, reason in _UNSUPPORTED_TENSORS.items():
        if word in name and not name.startswith("fake_"):
            return reason
    if node.kwargs and node.kwargs.get("generator") is not None:
        return GENERATOR
    return None


_AUTOGRAD = frozenset(
    ["backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"]
)
_EXPOSING_DATA = frozenset(
    ["__array__", "__dlpack__", "data_ptr", "numpy", "share_memory_", "storage", "tolist", "untyped_storage"]
)
_SIZE_FROM_DATA = frozenset(["argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"])
_UNSUPPORTED_TENSORS = {"sparse": SPARSE, "quantize": QUANTIZED, "mkldnn": MKLDNN}
#: In-place operators: the rules call them unknown because what they mutate depends on their arguments.
_UPDATES = "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem"
_IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in _UPDATES.split())


# Modules and bodies.


def refusal_of_higher_order(node: Node) -> str | None:
    """Why the call of an operator that runs bodies is refused."""
    if registers_hook(node.target):
        return HOOK
    if name_of_operator(node.target)[1] in _EFFECTS:
        return SIDE_EFFECT
    if aliases_with_own_backward(node):
        return OWN_BACKWARD
    for argument in node.all_input_nodes:
        body = _named(argument) if argument.op == "get_attr" else None
        reason = _refusal_of_body(body) if isinstance(body, nn.Module) else None
        if reason is not None:
            return reason
    return None


def _refusal_of_body(module: nn.Module) -> str | None:
    if not isinstance(module, GraphModule):
        if any(isinstance(part, nn.LSTM) for part in module.modules()):
            return LSTM
        if any(map(_drops_between_layers, module.modules())):
            return DROPOUT
        if any(isinstance(part, nn.MultiLabelMarginLoss) for part in module.modules()):
            return MULTILABEL
        behaviour = effects_of_module(module)
        return UNKNOWN_MODULE if behaviour.unknown else SIDE_EFFECT if behaviour.impure else None
    for node in module.graph.nodes:
        reason = refusal_by_inductor(node)
        if reason is not None:
            return f"in its body: {reason}"
    return None


def _drops_between_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.training and module.num_layers > 1 and module.dropout > 0


def _named(node: Node) -> object:
    """The attribute that the node refers to, if its graph has an owning module."""
    owner = node.graph.owning_module
    return None if owner is None else find(owner, str(node.target))


_EFFECTS = frozenset(("call_torchbind", "print", "with_effects"))


# Operators.


#: Operators that return a Python bool.
VALUE_FROM_DATA = frozenset(("allclose", "equal", "is_nonzero"))


def refusal_of_operator(node: Node) -> str | None:
    """Why a call of an operator with a schema is refused."""
    target = node.target
    reason = _known_refusal(target)
    if reason == NO_META_KERNEL:
        # One may have been registered since.
        reason = _refusal_of_all_calls(target)
    if reason is not None:
        return reason
    if loses_dropout(target, node.args, node.kwargs):
        return DROPOUT
    if target in _INDEXING and is_mask_among(node.args[1:]):
        return SIZE_DEPENDS_ON_DATA
    if _FOREACH_IN_PLACE.fullmatch(name_of_operator(target)[1]) and not _are_distinct_inputs(node.args[0]):
        return ALIASED_FOREACH
    if has_registered_effect(target) and not name_of_operator(target)[1].startswith(_COMPILED_EFFECTS):
        return SIDE_EFFECT
    if node.kwargs and node.kwargs.get("generator") is not None:
        return GENERATOR
    return None


def _refusal_of_all_calls(target: Any) -> str | None:
    """Why calls of an operator are refused whatever their arguments."""
    if target is torch.ops.aten.flatten.using_ints:
        return None
    namespace, name = name_of_operator(target)
    if namespace in _NAMESPACES:
        return _NAMESPACES[namespace]
    if name == "lstm":
        return LSTM
    if target is torch.ops.aten._assert_async.default:
        # Functionalization (torch 2.13) keeps the overload with a message, and loses this one.
        return SIDE_EFFECT
    if not has_meta_kernel(target):
        return NO_META_KERNEL
    if size_depends_on_data(target) and target not in _INDEXING:
        return SIZE_DEPENDS_ON_DATA
    depends = name in VALUE_FROM_DATA or (value_depends_on_data(target) and name not in _READING)
    return VALUE_DEPENDS_ON_DATA if depends else None


def is_mask_among(arguments: Iterable[object]) -> bool:
    """Whether one of the arguments is a boolean tensor, as far as the graph shows."""
    return any(map(_is_mask, nodes_in(list(arguments))))


def _are_distinct_inputs(listed: object) -> bool:
    """Whether no two tensors of a list can alias, as far as the graph shows."""
    nodes = list(nodes_in(listed))
    return len(nodes) == 1 or (
        len(set(nodes)) == len(nodes) and all(node.op in ("placeholder", "get_attr") for node in nodes)
    )


def _is_mask(node: Node) -> bool:
    value = value_of(node)
    if value is not None:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == operator.invert.__name__:
        return any(map(_is_mask, node.all_input_nodes))
    return node.op in ("call_function", "call_method") and name.partition(".")[0] in _COMPARISONS


#: Functionalization (torch 2.13) mutates a tensor once that is in the list twice or overlaps another.
_FOREACH_IN_PLACE = re.compile(r"_foreach_\w*[a-z]_")
_known_refusal = lru_cache(maxsize=1 << 12)(_refusal_of_all_calls)
_NAMESPACES = {
    "c10d": IN_PLACE_COLLECTIVE,
    "mkldnn": MKLDNN,
    "onednn": MKLDNN,
    "profiler": SIDE_EFFECT,
    "quantized": QUANTIZED,
    "sparse": SPARSE,
}
_INDEXING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor))
#: Operators that return one Python number, for which a trace has symbols.
_READING = frozenset(("item", "_local_scalar_dense"))
#: Checks, and waiting for a collective: compilers keep these effects where they stand.
_COMPILED_EFFECTS = ("_assert", "_functional_assert", "sym_constrain_range", "_functional_sym_constrain", "wait_tensor")
_LOGICAL = ("logical_and", "logical_not", "logical_or", "logical_xor")
_COMPARISONS = frozenset(("eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "lt", "ne", "signbit", *_LOGICAL))


# Traced values.


def refusal_of_values(node: Node) -> str | None:
    """Why a node is refused for its arguments or its result."""
    for each in (node, *node.all_input_nodes):
        value = value_of(each)
        if isinstance(value, Tensor):
            reason = _refusal_of_tensor(value)
            if reason is not None:
                return reason
        elif isinstance(value, torch.ScriptObject):
            return CPLUSPLUS_OBJECT
    return None


def _refusal_of_tensor(value: Tensor) -> str | None:
    if value.is_nested:
        return NESTED
    if value.layout is not torch.strided:
        return MKLDNN if value.is_mkldnn else SPARSE
    return QUANTIZED if value.is_quantized else None
