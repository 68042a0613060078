"""AOTAutograd's joint graph of a graph module, with flat inputs and outputs, and what prepares a module for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from partita._torch.compile_context import WrongWhenTraced, compiler_scope
from partita._torch.modes import fresh_modes
from partita._torch.pytrees import map_leaves


@final
class Arguments:
    """The arguments of a call, as distinct tensors and generators that a trace can compute gradients with.

    A tracer merges two arguments that are the same tensor, and an argument that is a parameter with that parameter.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        #: Whether a tensor was passed twice, or is state of the model.
        self.has_copies = False
        self.args, self.kwargs = map_leaves(self._traceable, (args, dict(kwargs)))

    def _traceable(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):  # Another one, in case that it is passed twice or held by the model.
            return leaf.clone_state()
        return self._distinct(leaf) if isinstance(leaf, Tensor) else leaf

    def _distinct(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._known:
            self.has_copies = True
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._known.add(id(tensor))
        # An inference tensor cannot be traced with gradients.
        return tensor.clone() if tensor.is_inference() else tensor


def join_tied_state(module: GraphModule) -> None:
    """Keeps only the first name of each parameter and buffer, and removes plain attributes that are one of them."""
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
    """Registers tensors that are plain attributes, which AOTAutograd cannot trace, as buffers; returns them by name."""
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


@final
@dataclass(frozen=True, slots=True)
class TracedJoint:
    """A joint graph: first the outputs of the forward, then a gradient or None for each input that is no tangent."""

    graph_module: GraphModule
    forward_outputs: int
    #: Results that AOTAutograd regenerates as views outside of the graph, where their gradients bypass it.
    aliased_outputs: tuple[int, ...]
    #: Constants that the forward mutates.
    mutated_constants: tuple[str, ...]
    #: Whether it mutates inputs.
    mutates_inputs: bool
    #: Whether AOTAutograd has merged inputs, since one that is mutated shares memory with another.
    merges_inputs: bool


def trace_joint(
    module: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Mapping[str, Tensor]
) -> TracedJoint:
    """The joint graph of a module for these arguments; state comes first among the inputs, tangents last.

    Buffers that are in `constants` become constants of the graph. The modes of the caller make no difference. Metadata
    of the traced nodes is kept: where in the model they were.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    lost = WrongWhenTraced()
    with fresh_modes(grad=True), compiler_scope(), lost, ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, args, dict(kwargs))
    traced, metadata = joint.graph_module, joint._aot_state.fw_metadata
    outputs = traced.graph.output_node().meta["desc"]
    mutated = [described.mutated_input for described in outputs if hasattr(described, "mutated_input")]
    kinds = {type(node.meta.get("desc")).__name__ for node in traced.graph.find_nodes(op="placeholder")}
    _make_flat(traced, metadata.num_forward_returns, constants)
    aliased = (bool(info.requires_grad) and info.output_type.name not in _BY_GRAPH for info in metadata.output_info)
    return TracedJoint(
        traced,
        metadata.num_forward_returns,
        aliased_outputs=tuple(number for number, is_aliased in enumerate(aliased) if is_aliased),
        mutated_constants=tuple(
            name for described in mutated if (name := _name(described)) in constants and name is not None
        ),
        mutates_inputs=bool(mutated),
        merges_inputs=not kinds <= _USUAL_INPUTS,
    )


_USUAL_INPUTS = {"ParamAOTInput", "BufferAOTInput", "PlainAOTInput", "TangentAOTInput"}


#: Of results that require gradients, AOTAutograd regenerates the others outside of the graph, as views.
_BY_GRAPH = ("non_alias", "unsafe_view_alias", "custom_function_view")


def _make_flat(traced: GraphModule, forward_outputs: int, constants: Mapping[str, Tensor]) -> None:
    """Makes inputs and tangents single placeholders, outputs one tuple, and constants attributes."""
    graph, output = traced.graph, traced.graph.output_node()
    inputs = [node for node in graph.find_nodes(op="placeholder") if not str(node.target).startswith("tangents")]
    dropped = {forward_outputs + at for at, node in enumerate(inputs) if _name(node.meta.get("desc")) in constants}
    # Constants have no gradients, which are the last outputs, one for each input.
    output.args = (tuple(_without(output.args[0], dropped)),)
    output.meta["desc"] = list(_without(output.meta["desc"], dropped))
    for at in sorted(dropped):
        _make_constant(traced, inputs[at - forward_outputs], constants)
    graph.set_codegen(CodeGen())
    type(traced).__name__ = "JointGraph"  # Each graph module has a class of its own.
    traced.recompile()


def _make_constant(traced: GraphModule, placeholder: Node, constants: Mapping[str, Tensor]) -> None:
    path = _name(placeholder.meta["desc"])
    assert path is not None
    name = f"_constant_{placeholder.name}"
    traced.register_buffer(name, constants[path], persistent=False)
    last = traced.graph.find_nodes(op="placeholder")[-1]
    with traced.graph.inserting_after(last):
        node = traced.graph.create_node("get_attr", name)
    node.meta.update({key: value for key, value in placeholder.meta.items() if key != "desc"})
    placeholder.replace_all_uses_with(node)
    traced.graph.erase_node(placeholder)


def _without(values: Any, dropped: set[int]) -> Iterator[Any]:
    return (value for at, value in enumerate(values) if at not in dropped)


def _name(description: Any) -> str | None:
    """The parameter or buffer that AOTAutograd's description of an input names."""
    name = getattr(description, "target", None)
    return name if isinstance(name, str) else None
