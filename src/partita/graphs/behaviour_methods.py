"""The behaviour of methods, which a graph knows by name only."""

from __future__ import annotations

from functools import cache

from partita._torch.schemas import signatures_of_method
from partita.graphs.behaviour_operators import rule_of_operator
from partita.graphs.behaviour_terms import ALIASING, EVERY, FENCE, FIRST, PURE, UNKNOWN, Behaviour, Rule

__all__ = ["rule_of_method"]


@cache
def rule_of_method(name: str) -> Rule:
    """The rule for every call of the method `name`, on whatever object."""
    if name in _KNOWN:
        return _KNOWN[name]
    if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS:
        return _UPDATES
    if name in _OPERATORS or name.replace("__r", "__", 1) in _OPERATORS:
        return _QUIET
    signatures = signatures_of_method(name)
    return rule_of_operator(signatures) if signatures else Rule(UNKNOWN)


_QUIET = Rule(PURE, is_quiet=True)
_SHARES = Rule(ALIASING, is_quiet=True)
_UPDATES = Rule(Behaviour(writes=(FIRST,), aliases=(FIRST,)))
_KEEPS = Rule(Behaviour(writes=(FIRST,), aliases=(EVERY,)))
_DRAWS = Rule(Behaviour(draws=True))

_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        "abs add and div eq floordiv ge gt invert le lshift lt matmul mod mul ne neg or pos pow rshift sub truediv xor"
        " bool complex contains float hash index int len long nonzero repr str format sizeof"
    ).split()
)

#: Methods without a schema, and those whose name means something else to TorchScript.
_KNOWN: dict[str, Rule] = (
    dict.fromkeys(
        "size dim stride numel ndimension nelement dim_order data_ptr const_data_ptr is_shared storage_type tolist"
        " is_floating_point is_complex is_contiguous is_inference is_signed element_size get_device storage_offset"
        " new_tensor unique lu to_sparse_coo startswith endswith lower upper strip join replace count is_set"
        " isdisjoint issubset".split(),
        _QUIET,
    )
    | dict.fromkeys(
        "__get__ __getitem__ __iter__ __reversed__ bfloat16 bool byte cdouble cfloat char cuda double float half int long"
        " short new ipu mtia xpu type as_subclass numpy storage untyped_storage get items keys values copy _replace _asdict"
        " reshape_as view_as __array__ __dlpack__".split(),
        _SHARES,
    )
    | dict.fromkeys("__setitem__ __delitem__ __setattr__ __delattr__ __set__ share_memory_".split(), _KEEPS)
    | dict.fromkeys(
        "append extend insert pop popitem update setdefault remove clear reverse add_module".split(),
        _KEEPS,
    )
    | dict.fromkeys(
        "manual_seed seed initial_seed get_state set_state clone_state graphsafe_get_state graphsafe_set_state".split(),
        _DRAWS,
    )
    | dict.fromkeys(["retain_grad", "requires_grad_"], _UPDATES)
    | {"backward": Rule(FENCE)}
)
