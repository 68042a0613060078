"""Raw graphs of torch.export, with mode toggles and a signature, and the two passes of torch beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import torch._export.passes.replace_autocast_with_hop_pass as torch_autocast
import torch._export.passes.replace_set_grad_with_hop_pass as torch_set_grad
from torch import Tensor, nn
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita.compat import replace_autocast_with_hop_pass as our_autocast
from partita.compat import replace_set_grad_with_hop_pass as our_set_grad

Passed = tuple[GraphModule, ExportGraphSignature | None]
Pass = Callable[[GraphModule, ExportGraphSignature | None], Passed]

THEIRS: dict[str, Pass] = {
    "grad": torch_set_grad.replace_set_grad_with_hop_pass,
    "autocast": torch_autocast.replace_autocast_with_hop_pass,
}
OURS: dict[str, Pass] = {
    "grad": our_set_grad.replace_set_grad_with_hop_pass,
    "autocast": our_autocast.replace_autocast_with_hop_pass,
}
THEIRS["both"] = lambda gm, signature: THEIRS["autocast"](*THEIRS["grad"](gm, signature))
OURS["both"] = lambda gm, signature: OURS["autocast"](*OURS["grad"](gm, signature))


class Net(nn.Module):
    """Two layers and a buffer, and a function that says what to do with them."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


class _TakenError(Exception):
    """Ends an export once the raw graph is there."""


def raw_export(model: nn.Module, *args: Any, **options: Any) -> tuple[GraphModule, ExportGraphSignature]:
    """What torch.export hands to its passes: a graph with toggles, and its signature."""
    found: list[Any] = []

    def take(gm: GraphModule, signature: ExportGraphSignature) -> None:
        found.append((gm, signature))
        raise _TakenError

    with patch.object(torch_set_grad, "replace_set_grad_with_hop_pass", take), suppress(_TakenError):
        torch.export.export(model, args, strict=False, **options)
    gm, signature = found[0]
    return gm, signature


def described(module: GraphModule, indent: str = "") -> Iterator[str]:
    """A graph and the bodies in it as text in which nodes go by their numbers."""
    numbers: dict[Node, str] = {}
    for node in module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = node.target if node.op != "placeholder" else ""
        yield f"{indent}{numbers[node]} {node.op} {target} {args} {kwargs} {_metadata(node)}"
    for name, body in module.named_children():
        if isinstance(body, GraphModule):
            yield f"{indent}{name}:"
            yield from described(body, f"{indent}    ")


def roles(signature: ExportGraphSignature | None) -> list[tuple[Any, ...]]:
    """What the inputs and outputs of a signature are, but for the names of their nodes."""
    assert signature is not None
    specs = (*signature.input_specs, *signature.output_specs)
    return [(spec.kind, spec.target, type(spec.arg), getattr(spec.arg, "value", None)) for spec in specs]


def _metadata(node: Node) -> str:
    known = [key for key in ("val", "nn_module_stack", "torch_fn") if key in node.meta]
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return f"{known} {stack} {node.meta.get('torch_fn')} {_value(node.meta.get('val'))}"


def _value(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [*map(_value, value)]
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
