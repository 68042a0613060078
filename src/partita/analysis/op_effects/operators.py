"""The behaviour of operators that have a schema, with the few things that schemas do not tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from partita._torch.operators.schemas import NO_DEFAULT, Argument, Signature
from partita.analysis.op_effects.terms import EVERY, FIRST, OpEffects, Rule, Slot, argument, merged

__all__ = ["rule_of_operator"]


def rule_of_operator(signatures: Sequence[Signature]) -> Rule:
    """The rule for a target that reaches one of these overloads."""
    # Where there is a choice, `out` overloads are reached by keyword only, which a rule sees call by call.
    plain = [s for s in signatures if not s.is_out] or signatures if len(signatures) > 1 else signatures
    usual = merged(map(_behaviour, plain))
    out = "out" if len(signatures) > 1 else None
    switches = [_switches(signature) for signature in plain]
    if not usual.acts or not all(switches):
        return Rule(usual, is_quiet=not usual.acts and out is None, out=out)
    idle = _idle(usual, plain[0].name)

    def by_call(node: Node) -> OpEffects:
        if all(any(_is_off(node, switch) for switch in row) for row in switches):
            return idle
        return _without_absent_writes(usual, node)

    return Rule(usual, by_call, out=out)


def _behaviour(signature: Signature) -> OpEffects:
    namespace, _, name = signature.name.partition("::")
    writes = _slots(a for a in signature.arguments if a.written or _is_written_silently(name, a))
    aliases = _slots(a for a in signature.arguments if a.shared)
    if (signature.may_share and name not in _UPDATES_STATISTICS) or name in _SHARES_SILENTLY:
        aliases = (EVERY,)
    if not writes and _writes_by_name(namespace, name):
        writes = aliases = (EVERY,)
    communicates = namespace in _COMMUNICATING
    waits = communicates and name == "wait_tensor"
    return OpEffects(
        writes=_slots(signature.arguments[:1]) if waits else writes,
        aliases=_slots(signature.arguments[:1]) if waits else aliases,
        draws=signature.draws or name in _TOUCHES_GENERATOR,
        impure=namespace in _IMPURE or (not signature.returns and not writes),
        communicates=communicates and not waits,
        waits=waits,
        fences=name in _RUNS_AUTOGRAD,
    )


def _slots(arguments: Iterable[Argument]) -> tuple[Slot, ...]:
    return tuple((argument.position, argument.name) for argument in arguments)


def _is_written_silently(name: str, argument: Argument) -> bool:
    return name in _UPDATES_STATISTICS and argument.name in ("running_mean", "running_var")


def _writes_by_name(namespace: str, name: str) -> bool:
    """Operators that write without an annotation: by torch's naming rule, or known ones."""
    return (name.endswith("_") and not name.endswith("__")) or namespace in ("c10d", "symm_mem") or name in _WRITES_ALL


def _switches(signature: Signature) -> list[tuple[Slot, object, object]]:
    """The arguments that turn the effect of an operator off: slot, value when off, value when absent."""
    name = signature.name.partition("::")[2]
    off = dict(_OFF)
    if name.removesuffix("_") in _DROPOUTS:
        off["p"] = 0
    if name == "native_dropout":
        off = {"train": False}
    if not (signature.draws or name in _UPDATES_STATISTICS):
        return []
    return [((a.position, a.name), off[a.name], a.default) for a in signature.arguments if a.name in off]


def _is_off(node: Node, switch: tuple[Slot, object, object]) -> bool:
    slot, off, default = switch
    given = argument(node, slot, default)
    return given is not NO_DEFAULT and not isinstance(given, Node) and given is not None and given == off


def _idle(usual: OpEffects, qualified: str) -> OpEffects:
    """What is left when the switch is off: dropout hands its input back, statistics are only read."""
    name = qualified.partition("::")[2]
    writes = () if name in _UPDATES_STATISTICS else usual.writes
    aliases = (*usual.aliases, FIRST) if name.removesuffix("_") in _DROPOUTS else usual.aliases
    return replace(usual, draws=False, writes=writes, aliases=tuple(dict.fromkeys(aliases)))


def _without_absent_writes(usual: OpEffects, node: Node) -> OpEffects:
    """Statistics that are None are not written."""
    present = tuple(slot for slot in usual.writes if slot == EVERY or argument(node, slot) is not None)
    return usual if present == usual.writes else replace(usual, writes=present)


#: Switches by argument name; the effect is off where any of them has this value.
_OFF = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0, "dropout": 0.0}
_DROPOUTS = frozenset(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"))

#: Operators that write running statistics, most of them without saying so (torch 2.13).
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

#: Operators whose result may share storage with an argument although the schema shows no alias (torch 2.13).
_SHARES_SILENTLY = frozenset(
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

_WRITES_ALL = frozenset(("_cudnn_rnn_flatten_weight", "set_data"))
_TOUCHES_GENERATOR = frozenset(
    ("_no_grad_normal_", "_no_grad_uniform_", "inductor_reserve_rng_state", "initial_seed", "manual_seed", "seed")
)
_RUNS_AUTOGRAD = frozenset(("_backward", "backward", "dist_backward"))
_COMMUNICATING = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"))
_IMPURE = frozenset(("debug_mode_ops", "profiler"))
