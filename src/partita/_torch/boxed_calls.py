"""Boxed calls: a graph takes its inputs in one list, which it empties, so that each can be freed after its last use.

AOTAutograd calls compiled graphs like this.
"""

from __future__ import annotations

from typing import Any

import torch.fx.graph
from torch.fx import Graph

__all__ = ["take_inputs_in_a_list"]

#: torch 2.11 may not have it; graphs are then called with their inputs one by one, which AOTAutograd can do as well.
_BoxedCodeGen: Any = getattr(torch.fx.graph, "_BoxedCodeGen", None)


def take_inputs_in_a_list(graph: Graph) -> None:
    """Lets the code of a plain graph be called with one list of its inputs, too; other graphs keep their convention."""
    inputs = graph.find_nodes(op="placeholder")
    is_plain = type(graph._codegen) is torch.fx.graph.CodeGen
    if _BoxedCodeGen is not None and is_plain and not any(node.args or str(node.target)[0] == "*" for node in inputs):
        graph.set_codegen(_ListOrInputs())


class _ListOrInputs(_BoxedCodeGen or torch.fx.graph.CodeGen):  # type: ignore[misc]
    """Torch's own takes nothing but a list, so that whoever calls the graph by hand has to know about it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [text.partition(":")[0].partition("=")[0].strip() for text in free_vars if text != "self"]
        lines = [f"def {self._func_name}(self, *given_){maybe_return_annotation}:"]
        if names:
            lines += [
                "    given_ = given_[0] if len(given_) == 1 and type(given_[0]) is list else list(given_)",
                f"    [{', '.join(names)}] = given_",
                "    given_.clear()",
            ]
        return "\n".join(lines)
