"""AOTAutograd's joint graph of a graph module: forward and backward in one graph, with plain inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from partita._torch.capture_fresh_modes import fresh_modes
from partita._torch.lowering_compiling import compiler_scope
from partita._torch.traced_dropout import LostDropout

__all__ = ["TracedJoint", "trace_joint"]


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
