"""Operators that a saved program names as text: whether a name is one of an operator, and nothing but that."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["NOT_REGISTERED", "operator_fault"]

NOT_REGISTERED = "no such operator is registered; import the library that defines it first"


def operator_fault(name: str) -> str | None:
    """Why `name` names no operator that torch may look up, or None.

    torch itself follows such a name from `torch` on to anything that can be called, `torch.os.system` for one.
    """
    if name in _FUNCTIONS:
        return None
    match = _OF_TORCH_OPS.fullmatch(name)
    if match is None:
        return "it is no operator"
    found: Any = torch.ops
    for part in match[1][1:].split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload | HigherOrderOperator):
        return NOT_REGISTERED
    if isinstance(found, OpOverload) and found._schema.name in _FILE_OPERATORS:
        return "it reads or writes files"
    return None


_OF_TORCH_OPS = re.compile(r"torch\.ops((?:\.[A-Za-z_]\w*){2,3})")
#: These take the name of a file, and read or write it.
_FILE_OPERATORS = frozenset(("aten::from_file", "aten::save", "debugprims::load_tensor"))
#: Arithmetic on sizes, and the levels of vmap and jvp as exports before dispatch show them.
_FUNCTIONS_BY_PREFIX = {
    "_operator.": "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ lshift rshift getitem",
    "math.": "trunc floor ceil",
    "torch.": "sym_not sym_int sym_float sym_ite sym_max sym_min sym_sqrt _sym_sqrt _sym_log2",
    "torch._functorch.predispatch.": """
        _add_batch_dim _remove_batch_dim _vmap_increment_nesting _vmap_decrement_nesting _jvp_increment_nesting
        _jvp_decrement_nesting _enter_dual_level _exit_dual_level _make_dual _unpack_dual _unwrap_for_grad
        lazy_load_decompositions
    """,
}
_FUNCTIONS = frozenset(f"{prefix}{name}" for prefix, names in _FUNCTIONS_BY_PREFIX.items() for name in names.split())
