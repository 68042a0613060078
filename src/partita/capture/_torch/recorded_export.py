"""torch.export with our own pass where its region passes are, and with a recorder of the model's mode blocks.

What is swapped in torch is swapped for the whole process, one capture at a time; exports in other threads find that
they are not recorded, and get torch's own passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from partita._torch import toggles
from partita._torch.modes import fresh_modes
from partita.capture._torch.caller_modes import mode_query_patches
from partita.capture._torch.hooks import hook_swaps
from partita.capture._torch.mode_blocks import (
    autocast_block_swaps,
    bare_toggle_swaps,
    grad_block_swaps,
    inference_block_swaps,
)
from partita.capture._torch.patching import Patch, checkpoint_swaps, fill_tables, node_swaps, patched
from partita.capture._torch.recorder import Recorder, current_recorder, recording

__all__ = ["RegionPass", "export_recorded"]


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
    """Exports a model, traced with gradients on or off and under no other mode, whatever the caller's modes are."""
    named = None if kwargs is None else dict(kwargs)
    with _LOCK, _swapped_in(model, recorder, region_pass), fresh_modes(grad=grad):
        args, named = tree_map_only(torch.Tensor, _as_normal_tensor, (args, named))
        try:
            with recording(recorder):
                return torch.export.export(model, args, named, dynamic_shapes=dynamic_shapes, strict=False)
        finally:
            recorder.constants.restore()


def _as_normal_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a trace with gradients can use; an inference tensor cannot be one."""
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def _swapped_in(model: torch.nn.Module, recorder: Recorder, region_pass: RegionPass) -> Iterator[None]:
    fill_tables()
    with patched(_swaps(model, recorder, region_pass)):
        yield


def _swaps(model: torch.nn.Module, recorder: Recorder, region_pass: RegionPass) -> list[Patch]:
    return [
        *_pass_swaps(model, recorder, region_pass),
        *grad_block_swaps(),
        *autocast_block_swaps(),
        *inference_block_swaps(),
        *bare_toggle_swaps(),
        *checkpoint_swaps(),
        *hook_swaps(),
        *node_swaps(),
        *mode_query_patches(),
    ]


def _pass_swaps(model: torch.nn.Module, recorder: Recorder, region_pass: RegionPass) -> list[Patch]:
    """Torch looks its two passes up by name, at every export: the first becomes ours, the second does nothing."""

    def ours(graph_module: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, ExportGraphSignature]:
        _drop_unread_questions(graph_module)
        _let_dtypes_follow_the_caller(graph_module, recorder)
        _remember_modules(model)
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


def _drop_unread_questions(graph_module: GraphModule) -> None:
    """Takes out the questions for the grad mode whose answer nothing puts back, in bodies too."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, GraphModule)]
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=toggles.IS_GRAD_ENABLED):
            if not node.users:
                graph.erase_node(node)


def _let_dtypes_follow_the_caller(graph_module: GraphModule, recorder: Recorder) -> None:
    """Takes the dtype out of the checks that torch puts before casts: a caller's autocast may well change it.

    The checks are there for decompositions, which turn a cast that did nothing in the trace into nothing. Inputs have
    the same dtype under every autocast.
    """
    check = torch.ops.aten._assert_tensor_metadata.default
    for node in graph_module.graph.find_nodes(op="call_function", target=check):
        if node not in recorder.seen and node.args[0].op != "placeholder":
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def _remember_modules(model: torch.nn.Module) -> None:
    """Tells torch once more which modules it exports: it keeps them in a global, which every export clears at its end.

    Seen in torch 2.13, where an export that begins and ends in another thread during this one makes this one fail.
    """
    trace: Any = importlib.import_module("torch.export._trace")
    if getattr(trace, "_EXPORT_MODULE_HIERARCHY", model) is None:
        trace._EXPORT_MODULE_HIERARCHY = trace._get_module_hierarchy(model)
