"""Effects of operators, from their schemas, with corrections where schemas do not declare an effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from torch.fx import Node

from partita._torch.operators.schemas import NO_DEFAULT, Argument, Signature
from partita.analysis.effects.terms import EVERY, FIRST, GENERATOR, Effects, Rule, Slot, argument, merged


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
        if all(any(_is_off(node, switch) for switch in row) for row in switches):
            return off
        return _without_absent_statistics(usual, node)

    return Rule(usual, by_call, out=out, generators=generators)


def _generators(signatures: Sequence[Signature]) -> tuple[Slot, ...]:
    slots = (_slots(a for a in signature.arguments if a.name == "generator") for signature in signatures)
    return tuple(dict.fromkeys((GENERATOR, *chain.from_iterable(slots))))


def _out_keywords(signatures: Sequence[Signature]) -> tuple[str, ...]:
    """`out`, and the names that `out` overloads have for single results, such as `values` and `indices`."""
    plain = {a.name for signature in signatures if not signature.is_out for a in signature.arguments}
    written = [a.name for signature in signatures if signature.is_out for a in signature.arguments if a.mutated]
    return tuple(dict.fromkeys(("out", *(name for name in written if name not in plain))))


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
    if name.removesuffix("_") in _DROPOUTS:
        off["p"] = 0
    if name == "native_dropout":
        off = {"train": False}
    if not (signature.uses_rng or name in _UPDATES_STATISTICS):
        return []
    return [((a.position, a.name), off[a.name], a.default) for a in signature.arguments if a.name in off]


def _is_off(node: Node, switch: tuple[Slot, object, object]) -> bool:
    slot, off, default = switch
    value = argument(node, slot, default)
    return value is not NO_DEFAULT and not isinstance(value, Node) and value is not None and value == off


def _switched_off(usual: Effects, qualified: str) -> Effects:
    """The effects when the switch is off: dropout returns its input, statistics are only read."""
    name = qualified.partition("::")[2]
    mutates = () if name in _UPDATES_STATISTICS else usual.mutates
    aliases = (*usual.aliases, FIRST) if name.removesuffix("_") in _DROPOUTS else usual.aliases
    return replace(usual, uses_rng=False, mutates=mutates, aliases=tuple(dict.fromkeys(aliases)))


def _without_absent_statistics(usual: Effects, node: Node) -> Effects:
    """Statistics that are None are not mutated."""
    present = tuple(slot for slot in usual.mutates if slot == EVERY or argument(node, slot) is not None)
    return usual if present == usual.mutates else replace(usual, mutates=present)


#: Switches by argument name; the effect is off where any of them has this value.
_OFF = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0, "dropout": 0.0}
_DROPOUTS = frozenset(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"))

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
