"""FLOPs of nodes, as torch counts them, from traced values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import is_torchs, refusal_of_call
from partita._torch.operator_schemas import base_name
from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.program._torch.saved_tensors import flop_formula, flops_of_call


class Flops:
    """The FLOPs of nodes; equal operators on equal shapes are counted once.

    torch's formulas need only shapes. Operators and functions of torch that decompose into operators with a formula,
    like `linear` and `einsum`, are run on meta tensors. Everything else counts as zero, as do nodes without traced
    values; symbolic sizes count as they were in the trace.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, node: Node) -> int:
        """The FLOPs of one node."""
        count = _way_to_count(node)
        if count is None or any(_is_unknown(value_of(source)) for source in node.all_input_nodes):
            return 0
        try:
            given = (node.args, node.kwargs)
            if count is not _run:
                return count(node, *map_arg(given, lambda source: without_memory(value_of(source))))
            key = (node.target, repr(map_arg(given, lambda source: _described(value_of(source)))))
            found = self._known.get(key)
            if found is None:
                arguments: Any = map_arg(given, lambda source: without_memory(value_of(source)))
                found = self._known[key] = _run(node, *arguments)
            return found
        except Exception:  # A function may reject meta tensors with any error; it then counts as zero.
            return 0

    def total(self, nodes: Iterable[Node]) -> int:
        """The FLOPs of several nodes."""
        return sum(map(self.of, nodes))


def without_memory(value: Any) -> Any:
    """A traced value with its tensors replaced by meta tensors of the same shapes."""
    if isinstance(value, torch.Tensor):
        return torch.empty([hint_of(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return tuple(map(without_memory, value))
    return hint_of(value)


def _described(value: Any) -> Any:
    """What `without_memory` keeps of a traced value, for comparisons."""
    if isinstance(value, torch.Tensor):
        return value.dtype, *map(hint_of, value.shape)
    return tuple(map(_described, value)) if isinstance(value, tuple | list) else hint_of(value)


def _way_to_count(node: Node) -> Callable[..., int] | None:
    """The function that counts a node; None if the node counts as zero whatever it reads."""
    if node.op != "call_function":
        return None
    if flop_formula(node.target) is not None:
        return _by_formula if value_of(node) is not None else _run if is_torchs(node.target) else None
    name = base_name(node.target)
    if not is_torchs(node.target) or name not in _PRODUCTS:
        return None
    return _recurrent if name in _RECURRENT else _run


#: Operators and functions of torch without a formula that may decompose into operators with one.
_RECURRENT = frozenset(("gru", "lstm", "rnn_relu", "rnn_tanh"))
_PRODUCTS = _RECURRENT | frozenset(
    (
        *("__imatmul__", "__matmul__", "__rmatmul__", "imatmul", "linalg_matmul", "linear", "matmul"),
        *("_convolution", "_convolution_mode", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("_scaled_dot_product_attention_math", "multi_head_attention_forward", "scaled_dot_product_attention"),
        *("bilinear", "chain_matmul", "einsum", "inner", "linalg_multi_dot", "multi_dot", "tensordot"),
        *("linalg_matrix_power", "linear_cross_entropy", "matrix_power"),
        *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
        # Functions of torch that are operators with a formula.
        *("addmm", "baddbmm", "bmm", "convolution", "mm"),
    )
)
#: More tensors than any argument of a product has.
_MANY = 1_000


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | list) and len(value) > _MANY)


def _by_formula(node: Node, args: Sequence[Any], kwargs: Any) -> int:
    formula = flop_formula(node.target)
    assert formula is not None
    result = without_memory(value_of(node))
    if not hasattr(formula, "__wrapped__") and _has_long_offsets((*args, *kwargs.values())):
        return 0
    return int(formula(*args, **kwargs, out_val=result))


def _has_long_offsets(arguments: Sequence[Any]) -> bool:
    """Whether a formula that reads more than shapes would build a list of all offsets in a batch."""
    return any(isinstance(one, torch.Tensor) and one.dim() == 1 and one.numel() > 2**20 for one in arguments)


def _recurrent(node: Node, args: Sequence[Any], kwargs: Any) -> int:
    """The FLOPs of a recurrent network: each weight matrix is multiplied by one row per step and sequence."""
    if kwargs or not isinstance(args[2], tuple | list) or isinstance(args[3], tuple | list):
        return 0
    rows = prod(args[0].shape[:-1])
    return int(2 * rows * sum(weight.numel() for weight in args[2] if weight.dim() == 2))


def _run(node: Node, args: Any, kwargs: Any) -> int:
    if refusal_of_call(node.target, args, kwargs) is not None:
        return 0
    return flops_of_call(node.target, args, kwargs)
