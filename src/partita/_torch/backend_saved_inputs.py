"""Inputs that a compiled forward writes and keeps for the backward: it keeps a copy, as eager mode does.

AOTAutograd (torch 2.13) copies such inputs, Inductor takes the copies for idle and leaves them out, and autograd then
refuses the backward, since what it kept was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["copy_saved_inputs"]


def copy_saved_inputs(forward: GraphModule, metadata: Any) -> None:
    """Makes the forward graph of AOTAutograd keep copies of the inputs that are written when it has run."""
    output = forward.graph.output_node()
    inputs = forward.graph.find_nodes(op="placeholder")
    written = {node for node, told in zip(inputs, metadata.input_info, strict=False) if told.mutates_data}
    results = list(_results(output))
    saved = [place for place in range(metadata.num_forward, len(results)) if results[place] in written]
    if not saved:
        return
    with forward.graph.inserting_after(inputs[-1]):
        for place in saved:
            results[place] = _copy(forward, results[place])
    output.args = (tuple(results),)
    forward.recompile()


def _results(output: Node) -> tuple[Any, ...]:
    given = output.args[0]
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _copy(forward: GraphModule, node: Any) -> Node:
    copied = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta["val"] = torch.ops.aten.clone.default(node.meta["val"])
    return copied
