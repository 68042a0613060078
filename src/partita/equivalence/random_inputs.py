"""Random inputs for a program, made from the sizes and dtypes that it was captured with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node

from partita._torch.pytrees import Tree
from partita._torch.symbolic_shapes import hint_of
from partita._torch.tensors import is_lack_of_memory
from partita.analysis.nodes import value_of
from partita.errors import OptionError
from partita.program.program import Program

#: Integers are indices more often than not, and most tables have at least this many rows.
_FEWEST_ROWS = 2
#: More than the inputs of a program take; a file from others may say any sizes.
_MOST_BYTES = 1 << 30
#: Operators through which an index goes as it is.
_PASSED_ON = frozenset(
    ("view", "reshape", "to", "_to_copy", "expand", "unsqueeze", "squeeze", "slice", "clone", "contiguous", "flatten")
)


def random_inputs(program: Program, *, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an exported program: normal floats, indices that fit the tables they look up.

    Symbolic sizes are as they were in the trace. Other integers are 0 or 1, since nothing says what they mean.
    """
    if program.export is None:
        raise OptionError("only an exported program says what its inputs are; pass inputs for this one")
    generator = Generator("cpu").manual_seed(seed)
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = [one.arg for one in program.export.signature.input_specs if one.kind is InputKind.USER_INPUT]
    _check_bytes([value_of(nodes[one.name]) for one in specs if not isinstance(one, ConstantArgument)])
    leaves = [one.value if isinstance(one, ConstantArgument) else _value(nodes[one.name], generator) for one in specs]
    call = next(one for one in program.export.module_calls if not one.fqn)
    try:
        args, kwargs = Tree((), (), call.signature.in_spec).rebuilt(leaves)
    except Exception as error:  # Of a registered class, to which a file may give any tensors.
        raise OptionError(f"the inputs cannot be put into their containers: {error}; pass inputs instead") from error
    return tuple(args), dict(kwargs)


def _check_bytes(traced: Iterable[Any]) -> None:
    tensors = [value for value in traced if isinstance(value, Tensor)]
    size = sum(math.prod(_sizes(tensor)) * tensor.element_size() for tensor in tensors)
    if size > _MOST_BYTES:
        raise OptionError(f"the inputs have {size:,} bytes, more than are made here; pass inputs instead")


def _sizes(traced: Tensor) -> list[int]:
    return [hint_of(size, _FEWEST_ROWS) for size in traced.shape]


def _value(node: Node, generator: Generator) -> Any:
    traced = value_of(node)
    if traced is None:
        raise OptionError(f"nothing is known about input {node.name!r}; pass inputs instead")
    if not isinstance(traced, Tensor):
        return hint_of(traced, _FEWEST_ROWS)
    try:
        return _tensor(node, traced, generator)
    except (RuntimeError, AssertionError, ImportError) as error:  # What torch raises depends on the device.
        if is_lack_of_memory(error):
            raise
        what = f"sizes {_sizes(traced)} of {traced.dtype} on {traced.device}"
        raise OptionError(f"torch makes no tensor here for input {node.name!r}, with {what}; pass inputs") from error


def _tensor(node: Node, traced: Tensor, generator: Generator) -> Tensor:
    sizes, dtype = _sizes(traced), traced.dtype
    # Where the generator is, whatever the default device.
    source: dict[str, Any] = {"generator": generator, "device": "cpu"}
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(sizes, dtype=torch.complex64 if dtype.is_complex else torch.float32, **source)
    elif dtype == torch.bool:
        made = torch.rand(sizes, **source) < 0.5
    else:
        made = torch.randint(_rows(node), sizes, **source)
    return made.to(device=traced.device, dtype=dtype).requires_grad_(traced.requires_grad)


def _rows(node: Node) -> int:
    """How many different indices an integer input may hold: the rows of the smallest table that it looks up."""
    seen, waiting, rows = {node}, deque([node]), list[int]()
    while waiting:
        current = waiting.popleft()
        for user in current.users:
            name = str(getattr(user.target, "overloadpacket", user.target)).rpartition(".")[2]
            if name in ("embedding", "embedding_bag") and len(user.args) > 1 and user.args[1] is current:
                table = value_of(user.args[0]) if isinstance(user.args[0], Node) else None
                rows += [int(hint_of(table.shape[0]))] if isinstance(table, Tensor) and table.ndim else []
            elif name in _PASSED_ON and user not in seen:
                seen.add(user)
                waiting.append(user)
    return max(min(rows, default=_FEWEST_ROWS), 1)
