"""Which functions and methods give a tuple or list, as their schemas say."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.jit._builtins import _find_builtin

from partita._torch.lasting import is_lasting

__all__ = ["may_return_container", "returns_container"]


def returns_container(target: Any) -> bool:
    """Whether a call of `target` (a function, or the name of a tensor method) surely gives a tuple, list or size."""
    return (isinstance(target, str) or is_lasting(target)) and _returns_container(target)


def may_return_container(target: Any) -> bool:
    """Whether a call of `target` gives a tuple or list for some arguments, or nobody knows what it gives."""
    schemas = _schemas(target)
    return not schemas or any(map(_gives_several, schemas))


@cache
def _returns_container(target: Any) -> bool:
    if target == "size":  # With an argument it gives a number, which nobody indexes.
        return True
    schemas = _schemas(target)
    return bool(schemas) and all(map(_gives_several, schemas))


def _schemas(target: Any) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target._schema]
    if isinstance(target, OpOverloadPacket):
        schemas = [getattr(target, name)._schema for name in target.overloads()]
    elif isinstance(target, str):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{target}")
    else:
        name = _find_builtin(target)
        schemas = torch._C._jit_get_schemas_for_operator(name) if name else []
    return [schema for schema in schemas if not any(argument.is_out for argument in schema.arguments)]


def _gives_several(schema: Any) -> bool:
    returns = schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch._C.ListType))
