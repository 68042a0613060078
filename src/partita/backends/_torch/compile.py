"""Calls AOTAutograd, Inductor and AOTInductor without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita.analysis.nodes import returned_by
from partita.backends._torch.fake_inputs import compiling
from partita.backends._torch.partitioners import drop_forward_effects, plain_partition
from partita.backends._torch.settings import own_cache_keys


def package_of(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """AOTInductor's package of `body`, which takes and returns nothing but tensors."""
    from torch._inductor import aot_compile
    from torch._inductor.package.package import package_aoti

    with compiling(inputs):
        files: Any = aot_compile(body, tuple(inputs), options={**options, "aot_inductor.package": True})
    package = BytesIO()
    package_aoti(package, files)
    return package.getvalue()


def function_of_package(package: bytes) -> Callable[..., Sequence[Any]]:
    """The function in a package; it loads native code, so pass nothing that you do not trust."""
    with NamedTemporaryFile(suffix=".pt2") as file:
        file.write(package)
        file.flush()
        # Like `torch._inductor.aoti_load_package`, without a check that needs a C++ compiler in torch 2.11.
        loader = torch._C._aoti.AOTIModelPackageLoader(file.name, "model", False, 1, -1)
    run: Callable[[list[Any]], Sequence[Any]] = loader.run
    return lambda *tensors: run(list(tensors))


def compile_with_inductor(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor's function for `body`, forward and backward."""
    from functorch.compile import config as settings
    from torch._dynamo.backends.registry import lookup_backend
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_one(graph: GraphModule, examples: Sequence[Any], **others: Any) -> Any:
        disable_buffer_donation()
        metadata = TracingContext.get().fw_metadata
        if others.get("is_backward"):
            drop_forward_effects(graph)
        elif metadata is not None:
            copy_saved_inputs(graph, metadata)
        return compile_fx_inner(graph, examples, **others)

    # A bundle can be stored, but is not in Inductor's own cache.
    with compiling(inputs), settings.patch(bundled_autograd_cache=_can_be_stored(body)), own_cache_keys():
        compile_fx: Any = lookup_backend("inductor")
        made = compile_fx(body, list(inputs), inner_compile=compile_one, config_patches=dict(options))
    function: Callable[..., Any] = made
    return function


def function_to_bytes(function: Callable[..., Any]) -> bytes | None:
    """Inductor's function as bytes; None for bodies with calls that torch cannot serialize."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    if getattr(function, "serialize", None) is None:
        return None
    data: bytes = AOTCompiledArtifact(function).serialize()
    return data


def function_from_bytes(data: bytes, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `function_to_bytes` stored; its kernels are rebuilt where they are not cached."""
    from torch._inductor import config
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with config.patch(dict(options)):
        return AOTCompiledArtifact.deserialize(data)


def _can_be_stored(body: GraphModule) -> bool:
    from torch._functorch._aot_autograd import autograd_cache

    try:
        autograd_cache.check_cacheable(body)
    except Exception:
        return False
    return True


def compile_ahead(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the forward and backward graphs of AOTAutograd for `body` without a compiler.

    The backward recomputes nothing of the forward, so that random numbers are generated once.
    """
    from functorch.compile import aot_module_simplified, make_boxed_func
    from torch._inductor import config

    def run_eagerly(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        disable_buffer_donation()
        return make_boxed_func(gm.forward)

    def run_backward_eagerly(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        drop_forward_effects(gm)
        return run_eagerly(gm, example_inputs)

    # By this option dead-code elimination decides whether random operators are dead too (torch 2.13), in any backend.
    with compiling(inputs), config.patch(fallback_random=True):
        made: Callable[..., Any] = aot_module_simplified(
            body, list(inputs), run_eagerly, run_backward_eagerly, plain_partition, keep_inference_input_mutations=True
        )
    return made


def disable_buffer_donation() -> None:
    """Declares that the backward of the graph being compiled reuses no saved tensor as a buffer.

    Else a backward overwrites saved tensors, and a second one, after `retain_graph=True`, is refused. With donation
    disabled, torch 2.13 does not overwrite, but refuses all the same: it takes "not computed" for "donated".
    """
    from torch._guards import TracingContext

    metadata = TracingContext.get().fw_metadata
    if metadata is not None and getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []


def copy_saved_inputs(forward: GraphModule, metadata: Any) -> None:
    """Makes the forward graph of AOTAutograd save copies of mutated inputs for backward, as eager mode does.

    AOTAutograd (torch 2.13) copies such inputs, Inductor eliminates the copies as no-ops, and autograd then refuses the
    backward, since a saved tensor was mutated.
    """
    output = forward.graph.output_node()
    inputs = forward.graph.find_nodes(op="placeholder")
    mutated = {node for node, info in zip(inputs, metadata.input_info, strict=False) if info.mutates_data}
    results = list(returned_by(forward.graph))
    saved = [place for place in range(metadata.num_forward, len(results)) if results[place] in mutated]
    if not saved:
        return
    with forward.graph.inserting_after(inputs[-1]):
        for place in saved:
            results[place] = _copy(forward, results[place])
    output.args = (tuple(results),)
    forward.recompile()


def _copy(forward: GraphModule, node: Any) -> Node:
    copied = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta["val"] = torch.ops.aten.clone.default(node.meta["val"])
    return copied
