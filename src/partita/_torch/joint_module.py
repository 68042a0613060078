"""What AOTAutograd traces, made ready: arguments apart, one name for each tensor, results with memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

__all__ = ["Arguments", "copy_outputs", "join_tied_state", "register_constants"]


@final
class Arguments:
    """The arguments of a call, as tensors that a trace can tell apart and compute gradients with.

    A tracer takes two arguments for one if they are the same tensor, or one for the parameter that it is.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        #: Whether a tensor was given twice, or is state of the model.
        self.has_copies = False
        self.args, self.kwargs = tree_map_only(Tensor, self._taken, (args, dict(kwargs)))

    def _taken(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._known:
            self.has_copies = True
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._known.add(id(tensor))
        # An inference tensor cannot be traced with gradients.
        return tensor.clone() if tensor.is_inference() else tensor


def join_tied_state(module: GraphModule) -> None:
    """Leaves one name to each parameter and buffer, the first one; plain attributes that are one of them go too."""
    first: dict[int, str] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    others = {path: kept for path, tensor in named if (kept := first.setdefault(id(tensor), path)) != path}
    for node, value in _read_tensors(module):
        path = str(node.target)
        kept = first.get(id(value), path)
        if kept != path:
            others[path] = kept
            node.target = kept
    for path in others:
        owner, name = _owner(module, path)
        delattr(owner, name)
    module.recompile()


def register_constants(module: GraphModule) -> dict[str, Tensor]:
    """Makes buffers of tensors that are plain attributes, which AOTAutograd cannot trace; by name, what they were."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    constants = {str(node.target): value for node, value in _read_tensors(module) if id(value) not in known}
    for path, value in constants.items():
        owner, name = _owner(module, path)
        delattr(owner, name)
        owner.register_buffer(name, value, persistent=False)
    return constants


def copy_outputs(module: GraphModule, numbers: Iterable[int]) -> None:
    """Makes `module` return copies of these results."""
    graph, output = module.graph, module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for number in numbers:
            source = results[number]
            assert isinstance(source, Node)
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta.update(source.meta)
            results[number] = copy
    output.args = (tuple(results),)
    module.recompile()


def _read_tensors(module: GraphModule) -> list[tuple[Node, Tensor]]:
    """The nodes that read a tensor of the module, each with the tensor."""
    found = []
    for node in module.graph.find_nodes(op="get_attr"):
        owner, name = _owner(module, str(node.target))
        value = getattr(owner, name)
        if isinstance(value, Tensor):
            found.append((node, value))
    return found


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    folder, _, name = path.rpartition(".")
    return module.get_submodule(folder), name
