"""AOTAutograd, Inductor and AOTInductor without Dynamo."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita.backends._torch.fake_inputs import compiling
from partita.backends._torch.joint_partitioners import drop_forward_effects, plain_partition

__all__ = [
    "compile_ahead",
    "compile_with_inductor",
    "function_from_bytes",
    "function_of_package",
    "function_to_bytes",
    "inductor_options",
    "instructions",
    "package_of",
    "vectors",
    "vectors_of_inductor",
]


# AOTInductor: a body and fake inputs into a package of native code, and a package into a function of tensors.


def package_of(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """The package that AOTInductor makes of `body`, which takes and gives nothing but tensors."""
    from torch._export.utils import _compiling_state_context
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._inductor.package.package import package_aoti

    patches = {**options, "aot_inductor.package": True}
    with compiling(inputs), _compiling_state_context():
        files: Any = compile_fx_aot(body, list(inputs), config_patches=patches)
    package = BytesIO()
    package_aoti(package, files)
    return package.getvalue()


def function_of_package(package: bytes) -> Callable[..., Sequence[Any]]:
    """The function in a package; it loads native code, so give it nothing that you do not trust."""
    with NamedTemporaryFile(suffix=".pt2") as file:
        file.write(package)
        file.flush()
        # What `torch._inductor.aoti_load_package` does, less a look at the machine that takes a compiler in torch 2.11.
        loader = torch._C._aoti.AOTIModelPackageLoader(file.name, "model", False, 1, -1)
    run: Callable[[list[Any]], Sequence[Any]] = loader.run
    return lambda *tensors: run(list(tensors))


# Inductor without Dynamo: a body and fake inputs into a function, and that into bytes and back.


def compile_with_inductor(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor's function of `body`, forward and backward."""
    import torch._functorch.config as settings
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(graph: GraphModule, examples: Sequence[Any], **others: Any) -> Any:
        nothing_is_donated()
        metadata = TracingContext.get().fw_metadata
        if others.get("is_backward"):
            drop_forward_effects(graph)
        elif metadata is not None:
            copy_saved_inputs(graph, metadata)
        return compile_fx_inner(graph, examples, **others)

    # A bundle can be stored, but Inductor's own cache knows nothing of it.
    with compiling(inputs), settings.patch(bundled_autograd_cache=_can_be_stored(body)), _own_cache_keys():
        made: Any = compile_fx(body, list(inputs), inner_compile=compile_one, config_patches=dict(options))
    function: Callable[..., Any] = made
    return function


def _own_cache_keys() -> AbstractContextManager[None]:
    """Keeps what is compiled here apart from what torch.compile has cached for an equal graph, and the other way.

    Keeps apart, too, what is compiled on different processors. Inductor's caches (torch 2.13) hold source text that is
    written for vectors of one length, and their keys say nothing of it: where they are shared, a processor with shorter
    vectors computes only a part of each result.
    """
    import torch.compiler.config as known

    config: Any = known
    tag = " ".join((config.cache_key_tag, _CACHE_TAG, vectors(), *instructions())).strip()
    patched: AbstractContextManager[None] = config.patch(cache_key_tag=tag)
    return patched


#: Counts the changes that are made to graphs on their way to Inductor, which caches do not see.
_CACHE_TAG = "partita 2"


def function_to_bytes(function: Callable[..., Any]) -> bytes | None:
    """What Inductor made, as bytes; None for bodies with calls that torch has no lasting name for."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    if getattr(function, "serialize", None) is None:
        return None
    data: bytes = AOTCompiledArtifact(function).serialize()
    return data


def function_from_bytes(data: bytes, options: Mapping[str, Any]) -> Callable[..., Any]:
    """What `function_to_bytes` stored, ready to be called; its kernels are built again where they are not cached."""
    from torch._inductor import config
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with config.patch(dict(options)):
        return AOTCompiledArtifact.deserialize(data)


def vectors_of_inductor(options: Mapping[str, Any]) -> str:
    """The vectors that Inductor's source text is written for with these options; built for others, it is wrong."""
    from torch._inductor import config

    bits = options.get("cpp.simdlen", config.cpp.simdlen)
    return vectors() if bits is None else f"{vectors()}, {bits} bits"


def inductor_options() -> dict[str, Any]:
    """Inductor's options and their values now."""
    from torch._inductor import config

    found: dict[str, Any] = config.get_config_copy()
    return found


def _can_be_stored(body: GraphModule) -> bool:
    from torch._functorch._aot_autograd import autograd_cache

    try:
        autograd_cache.check_cacheable(body)
    except Exception:
        return False
    return True


# AOTAutograd without a compiler behind it: forward and backward as graphs of core operators, run as they are.


def compile_ahead(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the graphs which AOTAutograd makes of `body`.

    Nothing of the forward runs again in the backward, so that random numbers are drawn once.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        nothing_is_donated()
        return make_boxed_func(gm.forward)

    def backward_alone(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        drop_forward_effects(gm)
        return as_it_is(gm, example_inputs)

    with compiling(inputs):
        made: Callable[..., Any] = aot_module_simplified(
            body, list(inputs), as_it_is, backward_alone, plain_partition, keep_inference_input_mutations=True
        )
    return made


def nothing_is_donated() -> None:
    """Tells the graph that is being compiled that its backward leaves what the forward kept as it is.

    Else a backward overwrites it, and a second one, after `retain_graph=True`, has to be refused. With donation
    switched off, torch 2.13 does not overwrite, but refuses all the same: it takes "not looked for" for "found".
    """
    from torch._guards import TracingContext

    metadata = TracingContext.get().fw_metadata
    if metadata is not None and getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []


# Inputs that a compiled forward writes and keeps for the backward: it keeps a copy, as eager mode does.
#
# AOTAutograd (torch 2.13) copies such inputs, Inductor takes the copies for idle and leaves them out, and autograd
# then refuses the backward, since what it kept was written.


def copy_saved_inputs(forward: GraphModule, metadata: Any) -> None:
    """Makes the forward graph of AOTAutograd keep copies of the inputs that are written when it has run."""
    output = forward.graph.output_node()
    inputs = forward.graph.find_nodes(op="placeholder")
    written = {node for node, told in zip(inputs, metadata.input_info, strict=False) if told.mutates_data}
    results = list(_results(output))
    saved = [place for place in range(metadata.num_forward, len(results)) if results[place] in written]
    if not saved:
        return
    with forward.graph.inserting_after(inputs[-1]):
        for place in saved:
            results[place] = _copy(forward, results[place])
    output.args = (tuple(results),)
    forward.recompile()


def _results(output: Node) -> tuple[Any, ...]:
    given = output.args[0]
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _copy(forward: GraphModule, node: Any) -> Node:
    copied = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta["val"] = torch.ops.aten.clone.default(node.meta["val"])
    return copied


# What native code depends on in the processor: the vectors that it is written for, and the instructions it may use.


def vectors() -> str:
    """The kind of vectors that torch and Inductor use here; `ATEN_CPU_CAPABILITY` can choose a lesser one."""
    return torch.backends.cpu.get_cpu_capability()


def instructions() -> list[str]:
    """The instructions that the processor has beyond those of its family, any of which a C++ compiler may use."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):
        return sorted(name for name, found in cpu.get_capabilities().items() if found is True)
    # Older versions of torch have one question for each of those that Inductor asks about.
    questions = [name for name in dir(cpu) if re.fullmatch(r"_is_\w+_supported", name)]
    return sorted(name[4:-10] for name in questions if getattr(cpu, name)())
