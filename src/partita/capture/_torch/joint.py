from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_map_only

from partita._torch.modes import fresh_modes
from partita.backends._torch.compile_context import LostDropout, compiler_scope

__all__ = ["Arguments", "TracedJoint", "copy_outputs", "join_tied_state", "register_constants", "trace_joint"]


# What AOTAutograd traces, made ready: arguments apart, one name for each tensor, results with memory of their own.


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


# AOTAutograd's joint graph of a graph module: forward and backward in one graph, with plain inputs and outputs.


@final
@dataclass(frozen=True, slots=True)
class TracedJoint:
    """A joint graph: first the outputs of the forward, then a gradient or None for each input that is no tangent."""

    graph_module: GraphModule
    forward_outputs: int
    #: Results whose gradients take another way than the graph, since they share memory with something else.
    aside: tuple[int, ...]
    #: Constants that the forward writes.
    written_constants: tuple[str, ...]
    #: Whether it writes inputs.
    writes: bool
    #: Whether an input that is written shares memory with another, so that the inputs are not those that were given.
    mixes_inputs: bool


def trace_joint(
    module: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Mapping[str, Tensor]
) -> TracedJoint:
    """The joint graph of a module for these arguments; state comes first among the inputs, tangents last.

    Buffers that are in `constants` become constants of the graph. The modes of the caller make no difference. Metadata
    of the traced nodes is kept: where in the model they were.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    lost = LostDropout()
    with fresh_modes(grad=True), compiler_scope(), lost, ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, args, dict(kwargs))
    traced, metadata = joint.graph_module, joint._aot_state.fw_metadata
    outputs = traced.graph.output_node().meta["desc"]
    written = [noted.mutated_input for noted in outputs if hasattr(noted, "mutated_input")]
    kinds = {type(node.meta.get("desc")).__name__ for node in traced.graph.find_nodes(op="placeholder")}
    _make_flat(traced, metadata.num_forward_returns, constants)
    return TracedJoint(
        traced,
        metadata.num_forward_returns,
        aside=tuple(number for number, info in enumerate(metadata.output_info) if _goes_aside(info)),
        written_constants=tuple(name for noted in written if (name := _name(noted)) in constants and name is not None),
        writes=bool(written),
        mixes_inputs=not kinds <= _USUAL,
    )


_USUAL = {"ParamAOTInput", "BufferAOTInput", "PlainAOTInput", "TangentAOTInput"}


def _goes_aside(info: Any) -> bool:
    """Whether AOTAutograd makes a result that needs gradients outside of the graph, as a view of something."""
    return bool(info.requires_grad) and info.output_type.name not in _IN_THE_GRAPH


_IN_THE_GRAPH = ("non_alias", "unsafe_view_alias", "custom_function_view")


def _make_flat(traced: GraphModule, forward_outputs: int, constants: Mapping[str, Tensor]) -> None:
    """Inputs one by one in place of a list of inputs and a list of tangents, one tuple of outputs, and constants."""
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


def _name(noted: Any) -> str | None:
    """The parameter or buffer that AOTAutograd speaks of."""
    name = getattr(noted, "target", None)
    return name if isinstance(name, str) else None
