"""The behaviour of methods, which a graph knows by name only."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import Tensor

from partita._torch.schemas import signatures_of_method
from partita.graphs.behaviour_operators import rule_of_operator
from partita.graphs.behaviour_terms import ALIASES, EVERY, FENCES, FIRST, QUIET, UNKNOWN, Behaviour, Rule

__all__ = ["rule_of_method"]


@cache
def rule_of_method(name: str) -> Rule:
    """The rule for every call of the method `name`, on whatever object."""
    if name in _KNOWN:
        return _KNOWN[name]
    if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS:
        return _UPDATES
    if name == "__pos__":  # It gives its argument back.
        return ALIASES
    if name in _OPERATORS or name.replace("__r", "__", 1) in _OPERATORS:
        return QUIET
    # An operator may have the name of something else's method: `wait` is one of torch, and of a handle on a collective.
    signatures = signatures_of_method(name) if hasattr(Tensor, name) or hasattr(str, name) else ()
    if not signatures:
        return Rule(UNKNOWN)
    # Tensor methods take no `out`.
    rule = replace(rule_of_operator(signatures), out=None)
    return replace(rule, is_quiet=rule.by_call is None and not rule.usual.acts)


_UPDATES = Rule(Behaviour(writes=(FIRST,), aliases=(FIRST,)))
_KEEPS = Rule(Behaviour(writes=(FIRST,), aliases=(EVERY,)))
_DRAWS = Rule(Behaviour(draws=True))

_OPERATOR_NAMES = """
    abs add and bool complex contains div eq float floordiv format ge gt hash index int invert le len long lshift lt
    matmul mod mul ne neg nonzero or pos pow repr rshift sizeof str sub truediv xor
"""
_OPERATORS = frozenset(f"__{name}__" for name in _OPERATOR_NAMES.split())

_ASKING = """
    const_data_ptr count data_ptr dim dim_order element_size endswith get_device is_complex is_contiguous
    is_floating_point is_inference is_set is_shared is_signed isdisjoint issubset join lower lu ndimension nelement
    new_tensor numel replace size startswith storage_offset storage_type stride strip to_sparse_coo tolist unique upper
"""
_SHARING = """
    __array__ __dlpack__ __get__ __getitem__ __iter__ __reversed__ _asdict _replace as_subclass bfloat16 bool byte
    cdouble cfloat char copy cuda double float get half int ipu items keys long mtia new numpy short storage type
    untyped_storage values xpu
"""
_KEEPING = """
    __delattr__ __delitem__ __set__ __setattr__ __setitem__ append clear extend insert pop popitem remove reverse
    setdefault share_memory_ update
"""
_SEEDING = """
    clone_state get_state graphsafe_get_state graphsafe_set_state initial_seed manual_seed seed set_state
"""

#: Methods without a schema, and those whose name means something else to TorchScript.
_KNOWN: dict[str, Rule] = {
    **dict.fromkeys(_ASKING.split(), QUIET),
    **dict.fromkeys(_SHARING.split(), ALIASES),
    **dict.fromkeys(_KEEPING.split(), _KEEPS),
    **dict.fromkeys(_SEEDING.split(), _DRAWS),
    "backward": FENCES,
    "retain_grad": _UPDATES,
}
