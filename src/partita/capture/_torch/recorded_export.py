"""torch.export with a recorder of the model's mode blocks, our own pass in place of its region passes, and repairs.

The patches of torch apply to the whole process, so a lock admits one capture at a time; exports in other threads are
not recorded, and run torch's own passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps
from threading import RLock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita._torch.modes import fresh_modes
from partita._torch.operator_schemas import mutated_nodes, viewed_node
from partita._torch.pytrees import map_tensors
from partita.capture._torch.caller_modes import mode_query_patches
from partita.capture._torch.mode_blocks import (
    autocast_block_patches,
    grad_block_patches,
    inference_block_patches,
    unscoped_toggle_patches,
)
from partita.capture._torch.patching import Patch, checkpoint_patches, fill_tables, node_patches, patched
from partita.capture._torch.recorder import Recorder, current_recorder, listening_recorder, recording
from partita.errors import CaptureError

#: From a graph as it was traced, with toggles in it, and its signature, to those that torch's verifier accepts.
RegionPass: TypeAlias = Callable[[GraphModule, ExportGraphSignature], tuple[GraphModule, ExportGraphSignature]]

_LOCK = RLock()


def export_recorded(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    dynamic_shapes: Any,
    recorder: Recorder,
    region_pass: RegionPass,
    grad: bool,
) -> ExportedProgram:
    """Exports a model, traced with gradients on or off and under no other mode, whatever the caller's modes are.

    Constants that the trace has mutated are restored.
    """
    _check_backward_hooks(model)
    named = None if kwargs is None else dict(kwargs)
    with _LOCK, patched(_all_patches(model, recorder, region_pass)), fresh_modes(grad=grad):
        # A trace with gradients cannot use an inference tensor.
        args, named = map_tensors(lambda one: one.clone() if one.is_inference() else one, (args, named))
        try:
            with recording(recorder):
                return torch.export.export(model, args, named, dynamic_shapes=dynamic_shapes, strict=False)
        finally:
            recorder.constants.restore()


def read_generators_from_inputs(exported: ExportedProgram) -> None:
    """Makes random operators use the generators that are passed to each call.

    torch.export (2.13) makes a constant of a generator that is an argument: each call uses the one of the trace.
    """
    inputs = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    passed = {
        _address(generator): inputs[spec.arg.name]
        for spec in specs
        if spec.kind is InputKind.USER_INPUT
        and isinstance(generator := inputs[spec.arg.name].meta.get("val"), torch.Generator)
    }
    for spec in [spec for spec in specs if spec.kind is InputKind.CUSTOM_OBJ]:
        constant = exported.constants.get(str(spec.target))
        source = passed.get(_address(constant)) if isinstance(constant, torch.Generator) else None
        if source is not None:
            node = inputs[spec.arg.name]
            node.replace_all_uses_with(source)
            exported.graph.erase_node(node)
            specs.remove(spec)
            del exported.constants[str(spec.target)]
    exported.graph_module.recompile()


def _address(generator: Any) -> int:
    """Distinguishes generators: the constant of an export is another Python object for the same one."""
    return int(generator._cdata)


def _all_patches(model: torch.nn.Module, recorder: Recorder, region_pass: RegionPass) -> list[Patch]:
    fill_tables()
    return [
        *_pass_patches(model, recorder, region_pass),
        *grad_block_patches(),
        *autocast_block_patches(),
        *inference_block_patches(),
        *unscoped_toggle_patches(),
        *checkpoint_patches(),
        *hook_patches(),
        *node_patches(),
        *mode_query_patches(),
    ]


def _pass_patches(model: torch.nn.Module, recorder: Recorder, region_pass: RegionPass) -> list[Patch]:
    """Torch looks up its two passes by name at every export: the first is replaced by ours, the second by nothing."""

    def ours(graph_module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, ExportGraphSignature]:
        _drop_unused_queries(graph_module)
        _drop_copies_onto_themselves(graph_module, recorder)
        _let_dtypes_follow_the_caller(graph_module, recorder)
        _restore_module_hierarchy(model)
        return region_pass(graph_module, signature)

    def nothing(graph_module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, ExportGraphSignature]:
        return graph_module, signature

    names = {"replace_set_grad_with_hop_pass": ours, "replace_autocast_with_hop_pass": nothing}
    return [
        _only_when_recorded(importlib.import_module(f"torch._export.passes.{name}"), name, replacement, recorder)
        for name, replacement in names.items()
    ]


def _only_when_recorded(owner: Any, name: str, replacement: Callable[..., Any], recorder: Recorder) -> Patch:
    original = getattr(owner, name)

    @wraps(original)
    def region_pass(*args: Any, **kwargs: Any) -> Any:
        return (replacement if current_recorder() is recorder else original)(*args, **kwargs)

    return Patch(owner, name, region_pass)


# Hooks that a model registers while it is traced are refused: autograd calls them, and no graph can hold them.


def hook_patches() -> list[Patch]:
    """Patches of the methods that register a hook, which raise inside a model that is being captured."""
    return [
        Patch(Tensor, "register_hook", _refusing(Tensor.register_hook)),
        Patch(Tensor, "register_post_accumulate_grad_hook", _refusing(Tensor.register_post_accumulate_grad_hook)),
        # Subclasses such as `save_on_cpu`, which only move saved tensors, change no values.
        Patch(saved_tensors_hooks, "__enter__", _refusing(saved_tensors_hooks.__enter__, only=saved_tensors_hooks)),
    ]


def _check_backward_hooks(model: torch.nn.Module) -> None:
    """Raises where a module has a hook of `register_backward_hook`: it is set on an autograd node, and so lost."""
    for name, module in model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            raise CaptureError(
                f"module {name!r} ({type(module).__name__}) has a hook of register_backward_hook, and no graph keeps a "
                "hook; remove it, or register it outside of the model, on an input, a weight or a result"
            )


def _refusing(method: Callable[..., Any], *, only: type | None = None) -> Callable[..., Any]:
    name = method.__qualname__.removesuffix(".__enter__")

    @wraps(method)
    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        if listening_recorder() is None or (only is not None and type(self) is not only):
            return method(self, *args, **kwargs)
        raise CaptureError(
            f"it calls {name}, and no graph keeps a hook; register it outside of the model, on an input, a weight or "
            "a result, or write what it does as an operator with a gradient of its own (torch.library.custom_op)"
        )

    return register


def _drop_unused_queries(graph_module: GraphModule) -> None:
    """Removes queries of the grad mode whose result is unused, in bodies too."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, GraphModule)]
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=toggles.IS_GRAD_ENABLED):
            if not node.users:
                graph.erase_node(node)


def _drop_copies_onto_themselves(graph_module: GraphModule, recorder: Recorder) -> None:
    """Removes copies of a buffer onto itself, which torch writes for `self.calls += 1` (2.13).

    A buffer that is mutated in place and assigned again is mutated once in eager mode. The copy would count as another
    mutation, so that autograd refuses the backward of whatever has read the buffer.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        buffer, value = node.args[:2]
        while value is not buffer and isinstance(value, Node) and mutated_nodes(value) == [viewed_node(value)]:
            value = viewed_node(value)
        if value is buffer and node not in recorder.seen:
            node.replace_all_uses_with(buffer)
            graph_module.graph.erase_node(node)


def _let_dtypes_follow_the_caller(graph_module: GraphModule, recorder: Recorder) -> None:
    """Removes the dtype from the metadata checks that torch inserts before casts: the caller's autocast may change it.

    The checks are there for decompositions, which remove a cast that was an identity in the trace. Inputs have the same
    dtype under every autocast.
    """
    check = torch.ops.aten._assert_tensor_metadata.default
    for node in graph_module.graph.find_nodes(op="call_function", target=check):
        if node not in recorder.seen and node.args[0].op != "placeholder":
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def _restore_module_hierarchy(model: torch.nn.Module) -> None:
    """Sets torch's global record of the exported modules again, which every export clears at its end.

    Otherwise an export that begins and ends in another thread during this one makes this one fail (torch 2.13).
    """
    trace: Any = importlib.import_module("torch.export._trace")
    if getattr(trace, "_EXPORT_MODULE_HIERARCHY", model) is None:
        named = model.named_modules(remove_duplicate=False)
        trace._EXPORT_MODULE_HIERARCHY = {name: type(module).__name__ for name, module in named}
