"""A backend for Partita that computes elementwise operators with NumPy, on the CPU and for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita import Tolerance

__all__ = ["NumPy"]

aten = torch.ops.aten

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.add.Tensor, torch.add), np.add),
    **dict.fromkeys((aten.sub.Tensor, torch.sub), np.subtract),
    **dict.fromkeys((aten.mul.Tensor, torch.mul), np.multiply),
    **dict.fromkeys((aten.neg.default, torch.neg), np.negative),
    **dict.fromkeys((aten.sin.default, torch.sin), np.sin),
    **dict.fromkeys((aten.cos.default, torch.cos), np.cos),
    **dict.fromkeys((aten.tanh.default, torch.tanh), np.tanh),
}


@dataclass(frozen=True, slots=True)
class NumPy:
    """Takes a handful of operators; `largest` bounds the elements of a tensor that it compiles for."""

    largest: int = 1 << 20

    name: ClassVar[str] = "numpy"
    tolerance: ClassVar[Tolerance] = Tolerance(relative=1e-5, absolute=1e-6)
    trains: ClassVar[bool] = False
    takes_symbols: ClassVar[bool] = False

    def refusal(self, node: Node) -> str | None:
        """Why NumPy does not compute `node`."""
        if node.op != "call_function" or node.target not in _FUNCTIONS:
            return "not one of the operators that it has"
        return "keyword arguments" if node.kwargs else None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """A function that goes through the nodes of `body` with arrays."""
        for value in inputs:
            self._check(value)
        nodes = list(body.graph.nodes)
        outputs = nodes[-1].args[0]

        def run(*given: Any) -> tuple[Any, ...]:
            values = iter(given)
            arrays: dict[Node, Any] = {}
            for node in nodes[:-1]:
                if node.op == "placeholder":
                    value = next(values)
                    arrays[node] = value.detach().numpy() if isinstance(value, Tensor) else value
                else:
                    operands = [arrays[operand] if isinstance(operand, Node) else operand for operand in node.args]
                    arrays[node] = np.asarray(_FUNCTIONS[node.target](*operands))
            return tuple(torch.from_numpy(arrays[output]) for output in outputs)

        return run

    def _check(self, value: Any) -> None:
        if isinstance(value, Tensor) and (value.dtype != torch.float32 or value.device.type != "cpu"):
            raise NotImplementedError(f"only float32 on the CPU, not {value.dtype} on {value.device}")
        if isinstance(value, Tensor) and value.numel() > self.largest:
            raise NotImplementedError(f"{value.numel()} elements, more than {self.largest}")
