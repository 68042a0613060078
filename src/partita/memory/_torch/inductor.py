"""What Inductor does with an operator: a view, a part of a fused kernel, or a kernel of its own; and its work."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from partita._torch.operator_schemas import viewed_node
from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.backends._torch.support import is_random
from partita.program._torch.saved_tensors import flop_formula


class OperatorKinds:
    """How nodes of a joint graph are compiled, by torch's own lists."""

    def __init__(self) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self._lists = get_default_op_list()

    def is_view(self, node: Node) -> bool:
        return viewed_node(node) is not None or self._lists.is_view(node) or node.target is _aten._unsafe_view.default

    def is_heavy(self, node: Node) -> bool:
        """Whether it is a matrix product, a convolution or attention: a kernel of its own."""
        return self._lists.is_compute_intensive(node) or is_attention(node)

    def is_fusible(self, node: Node) -> bool:
        """Whether it becomes part of a fused kernel."""
        if self._lists.is_fusible(node):
            return True
        return str(node.target).partition(".")[2].partition(".")[0] in _FUSED_TOO

    def is_random(self, node: Node) -> bool:
        """Whether its results depend on the RNG state; attention without dropout does not."""
        if node.op != "call_function" or not is_random(node.target):
            return False
        return not is_attention(node) or argument_of(node, "dropout_p") not in (0, None)


_aten: Any = torch.ops.aten
#: Fused by Inductor, although torch's list of fusible operators (2.13) lacks them.
_FUSED_TOO = (
    "full",
    "scatter",
    "select_scatter",
    "slice_scatter",
    "iota",
    "inductor_random",
    "inductor_lookup_seed",
    "scalar_tensor",
)


def is_attention(node: Node) -> bool:
    return "attention" in str(node.target)


def argument_of(node: Node, name: str) -> Any:
    """The argument of this name in the schema of an operator, or its default; None if there is none."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def flops_of(node: Node) -> int:
    """The FLOPs of a node by torch's formulas, half of them if attention is causal; 0 where there is none."""
    formula = flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    try:
        flops = int(hint_of(formula(*args, **kwargs, out_val=value_of(node))))
        return flops // 2 if is_attention(node) and argument_of(node, "is_causal") else flops
    except Exception:  # A formula may reject arguments with any error; the operator then counts by its bytes.
        return 0
