"""Effects of operators, functions and methods: from their schema, else from torch's signatures and naming rules."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.operator_schemas import (
    NO_DEFAULT,
    Argument,
    Signature,
    has_process_lifetime,
    returns_container,
    signatures_of,
    signatures_of_method,
)
from partita.analysis.effects.terms import (
    ALIASES,
    ALIASING,
    EVERY,
    FENCES,
    FIRST,
    GENERATOR,
    IMPURE,
    PURE,
    QUIET,
    UNKNOWN,
    Effects,
    Rule,
    Slot,
    argument,
    merged,
)
from partita.analysis.nodes import value_of

# Methods, which a graph knows by name only.


@cache
def rule_of_method(name: str) -> Rule:
    """The rule for every call of the method `name`, on whatever object."""
    if name in _KNOWN_METHODS:
        return _KNOWN_METHODS[name]
    if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS:
        return _UPDATES_FIRST
    if name == "__pos__":  # It returns its argument.
        return ALIASES
    if name in _OPERATORS or name.replace("__r", "__", 1) in _OPERATORS:
        return QUIET
    # An operator may have the name of something else's method: `wait` is one of torch, and of a handle on a collective.
    signatures = signatures_of_method(name) if hasattr(Tensor, name) or hasattr(str, name) else ()
    if not signatures:
        return Rule(UNKNOWN)
    # Tensor methods take no `out`.
    rule = replace(rule_of_operator(signatures), out=())
    return replace(rule, is_quiet=rule.by_call is None and not rule.usual.is_effectful)


_UPDATES_FIRST = Rule(Effects(mutates=(FIRST,), aliases=(FIRST,)))
_STORES = Rule(Effects(mutates=(FIRST,), aliases=(EVERY,)))
_USES_RNG = Rule(Effects(uses_rng=True))

_OPERATOR_NAMES = """
    abs add and bool complex contains div eq float floordiv format ge gt hash index int invert le len long lshift lt
    matmul mod mul ne neg nonzero or pos pow repr rshift sizeof str sub truediv xor
"""
_OPERATORS = frozenset(f"__{name}__" for name in _OPERATOR_NAMES.split())

_QUERIES = """
    const_data_ptr count data_ptr dim dim_order element_size endswith get_device is_complex is_contiguous
    is_floating_point is_inference is_set is_shared is_signed isdisjoint issubset join lower lu ndimension nelement
    new_tensor numel replace size startswith storage_offset storage_type stride strip to_sparse_coo tolist unique upper
"""
_ALIASING_METHODS = """
    __array__ __dlpack__ __get__ __getitem__ __iter__ __reversed__ _asdict _replace as_subclass bfloat16 bool byte
    cdouble cfloat char copy cuda double float get half int ipu items keys long mtia new numpy short storage type
    untyped_storage values xpu
"""
_STORING = """
    __delattr__ __delitem__ __set__ __setattr__ __setitem__ append clear extend insert pop popitem remove reverse
    setdefault share_memory_ update
"""
_SEEDING = """
    clone_state get_state graphsafe_get_state graphsafe_set_state initial_seed manual_seed seed set_state
"""

#: Methods without a schema, and those whose name means something else to TorchScript.
_KNOWN_METHODS: dict[str, Rule] = {
    **dict.fromkeys(_QUERIES.split(), QUIET),
    **dict.fromkeys(_ALIASING_METHODS.split(), ALIASES),
    **dict.fromkeys(_STORING.split(), _STORES),
    **dict.fromkeys(_SEEDING.split(), _USES_RNG),
    "backward": FENCES,
    "retain_grad": _UPDATES_FIRST,
}


# Python's own functions: `operator`, `math` and the builtins.


def _of_concatenation(node: Node) -> Effects:
    """`+` and `*` copy tensors and numbers, but a list made from lists holds the items of both."""
    return ALIASING if all(map(_may_concatenate, node.args)) else PURE


def _of_update(node: Node) -> Effects:
    """`+=` mutates its left side; a list then also holds the items of the right side."""
    return Effects(mutates=(FIRST,), aliases=(EVERY,) if any(map(_is_container, node.args)) else (FIRST,))


def _of_setitem(node: Node) -> Effects:
    """A tensor copies the value that is assigned; a list or dict stores it."""
    container, key = node.args[0], node.args[1]
    is_tensor = key is None or isinstance(key, slice | tuple | Node | type(...))
    if isinstance(container, Node) and isinstance(value_of(container), torch.Tensor):
        is_tensor = True
    return Effects(mutates=(FIRST,), aliases=(FIRST,) if is_tensor else (EVERY,))


def _may_concatenate(value: object) -> bool:
    """A list is added to a list, or repeated so many times; a tensor takes part in neither."""
    return isinstance(value, int) or _is_container(value)


def _is_container(value: object) -> bool:
    if not isinstance(value, Node):
        return isinstance(value, tuple | list)
    traced = value_of(value)
    if traced is not None:
        return isinstance(traced, tuple | list)
    # An input without a traced value may be a list as well as a tensor.
    return (
        value.op == "placeholder"
        or value.target in (list, tuple)
        or (value.op in ("call_function", "call_method") and returns_container(value.target))
    )


def _named(module: object, names: Iterable[str], rule: Rule) -> dict[Any, Rule]:
    return {getattr(module, name): rule for name in names if callable(getattr(module, name, None))}


_QUIET_BUILTINS = """
    abs all any bool bytes callable chr complex divmod float format hasattr hash hex id int isinstance issubclass len
    oct ord pow range repr round slice str sum type
"""
_ALIASING_BUILTINS = "dict enumerate frozenset getattr iter list max min reversed set sorted tuple zip"
_UPDATES = """
    iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
"""

#: The functions of the language with known effects.
PYTHON_RULES: dict[Any, Rule] = {
    **_named(math, dir(math), QUIET),
    **_named(operator, operator.__all__, QUIET),
    **_named(operator, ("pos",), ALIASES),
    **_named(operator, ("attrgetter", "call", "itemgetter", "methodcaller"), Rule(UNKNOWN)),
    **_named(operator, _UPDATES.split(), Rule(UNKNOWN, _of_update)),
    **_named(operator, ("add", "mul", "or_"), Rule(PURE, _of_concatenation, is_quiet=True)),
    **_named(builtins, _QUIET_BUILTINS.split(), QUIET),
    **_named(builtins, _ALIASING_BUILTINS.split(), ALIASES),
    **_named(builtins, ("delattr", "next", "setattr"), _STORES),
    operator.concat: ALIASES,
    operator.delitem: _STORES,
    operator.getitem: Rule(Effects(aliases=((0, "a"),)), is_quiet=True),
    operator.setitem: Rule(UNKNOWN, _of_setitem),
    print: IMPURE,
    typing.cast: ALIASES,
}


# Functions in general.


def rule_of_function(target: Callable[..., Any]) -> Rule:
    """The rule for every call of `target`; an unknown function gets the rule `UNKNOWN`."""
    # A closure may hold a whole model, so only targets with the lifetime of the process are cached.
    return _cached_rule(target) if has_process_lifetime(target) else _rule(target)


@lru_cache(maxsize=1 << 16)
def _cached_rule(target: Callable[..., Any]) -> Rule:
    return _rule(target)


def _rule(target: Callable[..., Any]) -> Rule:
    if target in _KNOWN_FUNCTIONS:
        return _KNOWN_FUNCTIONS[target]
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    by_module = _rule_by_module(module, name)
    if by_module is not None:
        return by_module
    signatures = signatures_of(target)
    if signatures:
        return rule_of_operator(signatures)
    if getattr(torch.Tensor, name, None) is target:
        return rule_of_method(name)
    if name == "__get__":
        return ALIASES
    if module in ("torch.nn.functional", "torch.functional", "torch._lowrank", "torch._lobpcg"):
        return _rule_by_parameters(target)
    return _rule_by_name(target, module, name)


def _rule_by_module(module: str, name: str) -> Rule | None:
    """Whole modules of torch whose functions have the same effects."""
    if module in ("torch.random", "torch.cuda.random", "torch.mps.random", "torch.xpu.random"):
        return Rule(Effects(uses_rng=True))
    if module == "torch.nn.init":
        tensor = (0, "tensor")
        return Rule(Effects(mutates=(tensor,), aliases=(tensor,), uses_rng=True))
    if module.startswith(("torch.masked.", "torch.signal.")):
        return ALIASES
    if module == "torch.nn.attention":  # What an `sdpa_kernel` block of the model is in a graph of Dynamo.
        return FENCES if name == "_sdpa_kernel" else QUIET if name == "_backend_from_string" else None
    if module.startswith(("torch._functorch.", "torch._C._functorch")):
        return ALIASES if name in _WITHOUT_LEVEL else FENCES
    return None


def _rule_by_name(target: Any, module: str, name: str) -> Rule:
    if module == "torch" or module.startswith(_MODULES_WITH_QUERIES):
        if name.startswith(
            ("_get_tracing_state", "_log_api_usage", "_sym_", "are_", "get_", "is_", "sym_", "typename")
        ):
            return QUIET
        if name.startswith(("_assert", "_check")):
            return IMPURE
        if name.startswith(("_enter", "_exit", "_set_", "autocast_", "clear_autocast", "set_", "use_")):
            return FENCES
    if isinstance(target, type) and issubclass(target, tuple) and hasattr(target, "_fields"):
        return ALIASES
    return Rule(UNKNOWN)


def _rule_by_parameters(target: Callable[..., Any]) -> Rule:
    """Functions of torch.nn.functional: their parameters tell what they mutate and when they use the RNG."""
    name = target.__name__
    parameters = inspect.signature(target).parameters
    first = (0, next(iter(parameters), "input"))
    aliases: tuple[Slot, ...] = (first,) if name in _MAY_RETURN_INPUT else ()
    usual = Effects(aliases=(EVERY,) if name.startswith("_") else aliases, uses_rng=name in _RANDOM)
    if name.endswith("_"):
        return Rule(replace(usual, mutates=(first,), aliases=(first,)))
    if not usual.uses_rng and parameters.keys().isdisjoint(("inplace", "max_norm", "out", "running_mean")):
        return Rule(usual, is_quiet=True)
    places = {key: (i, key) for i, key in enumerate(parameters)}

    def by_call(node: Node) -> Effects:
        arguments = {key: argument(node, slot, parameters[key].default) for key, slot in places.items()}
        mutates = tuple(places[key] for key in _mutated_parameters(arguments))
        shared = tuple(slot for slot in mutates if slot[1] == "out")
        if arguments.get("inplace", False) is not False:
            mutates, shared = (*mutates, first), (*shared, first)
        uses_rng = usual.uses_rng and not _is_off(name, arguments)
        return replace(usual, mutates=mutates, aliases=usual.aliases + shared, uses_rng=uses_rng)

    return Rule(usual, by_call)


def _mutated_parameters(arguments: dict[str, Any]) -> list[str]:
    """The parameters, other than the input, that a call with these arguments mutates."""
    names = [] if arguments.get("out") is None else ["out"]
    if arguments.get("max_norm") is not None:
        names.append("weight" if "weight" in arguments else "input")
    updates = arguments.get("training", arguments.get("use_input_stats", False))
    if "running_mean" in arguments and updates is not False:
        names += [key for key in ("running_mean", "running_var") if arguments[key] is not None]
    return names


def _is_off(name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call with these arguments does not use the RNG."""
    chance = arguments.get("p" if "dropout" in name else "dropout_p")
    return arguments.get("training") is False or (isinstance(chance, int | float) and chance == 0)


_MODULES_WITH_QUERIES = (
    "torch._C",
    "torch._jit_internal",
    "torch.amp",
    "torch.autograd",
    "torch.compiler",
    "torch.overrides",
)
_DROPOUTS = frozenset(
    ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
)
#: Functions that may return their input itself.
_MAY_RETURN_INPUT = _DROPOUTS | {"local_response_norm"}
_RANDOM = (
    _DROPOUTS
    | {"get_approximate_basis", "gumbel_softmax", "lobpcg", "multi_head_attention_forward", "pca_lowrank", "rrelu"}
    | {"svd_lowrank", "fractional_max_pool2d", "fractional_max_pool3d", "_fractional_max_pool2d"}
    | {"_fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
)

#: Functions of functorch that wrap, unwrap or query; all others there change the stack of transforms.
_WITHOUT_LEVEL = frozenset(
    (
        "_add_batch_dim",
        "_make_dual",
        "_remove_batch_dim",
        "_unpack_dual",
        "_unwrap_batched",
        "_unwrap_for_grad",
        "_wrap_for_grad",
        "get_unwrapped",
        "is_batchedtensor",
        "lazy_load_decompositions",
        "maybe_get_bdim",
        "maybe_get_level",
    )
)

_KNOWN_FUNCTIONS: dict[Any, Rule] = {
    **PYTHON_RULES,
    torch.overrides.has_torch_function: QUIET,
    **dict.fromkeys((torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo, torch.Generator), QUIET),
    **dict.fromkeys((torch.nn.Parameter, torch.asarray, torch.from_numpy, torch.frombuffer), ALIASES),
    torch.autograd.backward: FENCES,
    torch.autograd.grad: FENCES,
}


def rule_of_operator(signatures: Sequence[Signature]) -> Rule:
    """The rule for a target that reaches one of these overloads."""
    # Where there is a choice, `out` overloads are reached by keyword only, which a rule sees call by call.
    plain = [s for s in signatures if not s.is_out] or signatures if len(signatures) > 1 else signatures
    usual = merged(map(_effects_of, plain))
    out = _out_keywords(signatures) if len(signatures) > 1 else ()
    generators = _generators(plain)
    switches = [_switches(signature) for signature in plain]
    if not usual.is_effectful or not all(switches):
        return Rule(usual, is_quiet=not usual.is_effectful and not out, out=out, generators=generators)
    off = _switched_off(usual, plain[0].name)

    def by_call(node: Node) -> Effects:
        if all(any(_has_switch_off(node, switch) for switch in row) for row in switches):
            return off
        return _without_absent_statistics(usual, node)

    return Rule(usual, by_call, out=out, generators=generators)


def _generators(signatures: Sequence[Signature]) -> tuple[Slot, ...]:
    slots = (_slots(a for a in signature.arguments if a.name == "generator") for signature in signatures)
    return tuple(dict.fromkeys((GENERATOR, *chain.from_iterable(slots))))


def _out_keywords(signatures: Sequence[Signature]) -> tuple[str, ...]:
    """`out`, and the names that `out` overloads have for single results, such as `values` and `indices`."""
    plain = {a.name for signature in signatures if not signature.is_out for a in signature.arguments}
    mutated = [a.name for signature in signatures if signature.is_out for a in signature.arguments if a.mutated]
    return tuple(dict.fromkeys(("out", *(name for name in mutated if name not in plain))))


def _effects_of(signature: Signature) -> Effects:
    namespace, _, name = signature.name.partition("::")
    mutates = _slots(a for a in signature.arguments if a.mutated or _is_mutated_silently(name, a))
    aliases = _slots(a for a in signature.arguments if a.aliased)
    if (signature.may_alias and name not in _UPDATES_STATISTICS) or name in _ALIASES_SILENTLY:
        aliases = (EVERY,)
    if not mutates and _mutates_by_name(namespace, name):
        mutates = aliases = (EVERY,)
    communicates = namespace in _COMMUNICATING
    waits = communicates and name == "wait_tensor"
    return Effects(
        mutates=_slots(signature.arguments[:1]) if waits else mutates,
        aliases=_slots(signature.arguments[:1]) if waits else aliases,
        uses_rng=signature.uses_rng or name in _TOUCHES_GENERATOR,
        impure=namespace in _IMPURE or (not signature.returns and not mutates),
        communicates=communicates and not waits,
        waits=waits,
        fences=name in _RUNS_AUTOGRAD,
    )


def _slots(arguments: Iterable[Argument]) -> tuple[Slot, ...]:
    return tuple((argument.position, argument.name) for argument in arguments)


def _is_mutated_silently(name: str, argument: Argument) -> bool:
    return name in _UPDATES_STATISTICS and argument.name in ("running_mean", "running_var")


def _mutates_by_name(namespace: str, name: str) -> bool:
    """Operators that mutate without an annotation: by torch's naming rule, or known ones."""
    return (name.endswith("_") and not name.endswith("__")) or namespace in ("c10d", "symm_mem") or name in _MUTATES_ALL


def _switches(signature: Signature) -> list[tuple[Slot, object, object]]:
    """The arguments that turn the effect of an operator off: slot, value when off, value when absent."""
    name = signature.name.partition("::")[2]
    off = dict(_OFF)
    if name.removesuffix("_") in _DROPOUT_OPERATORS:
        off["p"] = 0
    if name == "native_dropout":
        off = {"train": False}
    if not (signature.uses_rng or name in _UPDATES_STATISTICS):
        return []
    return [((a.position, a.name), off[a.name], a.default) for a in signature.arguments if a.name in off]


def _has_switch_off(node: Node, switch: tuple[Slot, object, object]) -> bool:
    slot, off, default = switch
    value = argument(node, slot, default)
    return value is not NO_DEFAULT and not isinstance(value, Node) and value is not None and value == off


def _switched_off(usual: Effects, qualified: str) -> Effects:
    """The effects when the switch is off: dropout returns its input, statistics are only read."""
    name = qualified.partition("::")[2]
    mutates = () if name in _UPDATES_STATISTICS else usual.mutates
    aliases = (*usual.aliases, FIRST) if name.removesuffix("_") in _DROPOUT_OPERATORS else usual.aliases
    return replace(usual, uses_rng=False, mutates=mutates, aliases=tuple(dict.fromkeys(aliases)))


def _without_absent_statistics(usual: Effects, node: Node) -> Effects:
    """Statistics that are None are not mutated."""
    present = tuple(slot for slot in usual.mutates if slot == EVERY or argument(node, slot) is not None)
    return usual if present == usual.mutates else replace(usual, mutates=present)


#: Switches by argument name; the effect is off where any of them has this value.
_OFF = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0, "dropout": 0.0}
_DROPOUT_OPERATORS = frozenset(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"))

#: Operators that mutate running statistics, most of them without an annotation (torch 2.13).
_UPDATES_STATISTICS = frozenset(
    (
        "_batch_norm_impl_index",
        "_native_batch_norm_legit",
        "batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
        "cudnn_batch_norm",
        "instance_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    )
)

#: Operators whose result may alias an argument although the schema does not say so (torch 2.13).
_ALIASES_SILENTLY = frozenset(
    (
        "_sparse_compressed_tensor_unsafe",
        "_sparse_compressed_tensor_with_dims",
        "_sparse_coo_tensor_unsafe",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_sparse_csr_tensor_unsafe",
        "_unsafe_view",
        "as_tensor",
        "sparse_bsc_tensor",
        "sparse_bsr_tensor",
        "sparse_compressed_tensor",
        "sparse_coo_tensor",
        "sparse_csc_tensor",
        "sparse_csr_tensor",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "broadcast_tensors",
        "cartesian_prod",
        "chain_matmul",
        "conj_physical",
        "data",
        "dequantize",
        "einsum",
        "histogramdd",
        "meshgrid",
        "set_",
        "set_data",
        "sum_to_size",
        "to_dense",
        "to_mkldnn",
        "to_sparse",
        "type_as",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
    )
)

_MUTATES_ALL = frozenset(("_cudnn_rnn_flatten_weight", "set_data"))
_TOUCHES_GENERATOR = frozenset(
    ("_no_grad_normal_", "_no_grad_uniform_", "inductor_reserve_rng_state", "initial_seed", "manual_seed", "seed")
)
_RUNS_AUTOGRAD = frozenset(("_backward", "backward", "dist_backward"))
_COMMUNICATING = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"))
_IMPURE = frozenset(("debug_mode_ops", "profiler"))
