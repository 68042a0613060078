"""Calls AOTAutograd, Inductor and AOTInductor without Dynamo, and torch's partitioners of joint graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from tempfile import NamedTemporaryFile
from threading import RLock
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from partita.backends._torch.fake_inputs import compiling
from partita.backends._torch.support import is_random


def package_of(body: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """AOTInductor's package of `body`, which takes and returns nothing but tensors."""
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
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(graph: GraphModule, examples: Sequence[Any], **others: Any) -> Any:
        disable_buffer_donation()
        metadata = TracingContext.get().fw_metadata
        if others.get("is_backward"):
            drop_forward_effects(graph)
        elif metadata is not None:
            copy_saved_inputs(graph, metadata)
        return compile_fx_inner(graph, examples, **others)

    # A bundle can be stored, but is not in Inductor's own cache.
    with compiling(inputs), settings.patch(bundled_autograd_cache=_can_be_stored(body)), _own_cache_keys():
        made: Any = compile_fx(body, list(inputs), inner_compile=compile_one, config_patches=dict(options))
    function: Callable[..., Any] = made
    return function


def _own_cache_keys() -> AbstractContextManager[None]:
    """Cache keys that differ from those of torch.compile for an equal graph, and between processors.

    Inductor's caches (torch 2.13) hold source text for vectors of one length, which is not part of their keys: where
    they are shared, a processor with shorter vectors computes only a part of each result.
    """
    import torch.compiler.config as known

    settings: Any = known
    tag = " ".join((settings.cache_key_tag, _CACHE_TAG, vectors(), *instructions())).strip()
    patched: AbstractContextManager[None] = settings.patch(cache_key_tag=tag)
    return patched


#: The version of our changes to graphs before Inductor gets them, which its cache keys do not contain.
_CACHE_TAG = "partita 2"


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


@contextmanager
def kernels_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Makes Inductor build its kernels in a folder, and look for them there; by default that is a temporary one."""
    before = os.environ.get(_KERNELS)
    os.environ[_KERNELS] = os.fspath(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_KERNELS, None)
        else:
            os.environ[_KERNELS] = before


_KERNELS = "TORCHINDUCTOR_CACHE_DIR"


def tested_instructions() -> str | None:
    """The vector instructions that Inductor has found to work here; None if it has not looked for them."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list

    return str(pick_vec_isa()) if valid_vec_isa_list.cache_info().currsize else None


def skip_tests_of(instructions: str | None) -> None:
    """Lets Inductor do without compiling and running a test program, if it would choose these vector instructions.

    That takes longer than loading the functions of a model. The processor must have all that was used to build them.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list

    if instructions is None or valid_vec_isa_list.cache_info().currsize:
        return
    with config.patch({"cpp.vec_isa_ok": True}):
        chosen = str(pick_vec_isa())
    if chosen != instructions:
        valid_vec_isa_list.cache_clear()


def vectors_of_inductor(options: Mapping[str, Any]) -> str:
    """The vector extension that Inductor's source text is written for with these options; it is wrong for others."""
    bits = {**inductor_options(), **options}["cpp.simdlen"]
    return vectors() if bits is None else f"{vectors()}, {bits} bits"


def compiler_settings() -> str:
    """The settings of Inductor and AOTAutograd, and those of torch that they read, as text."""
    from functorch.compile import config

    settings: list[tuple[str, Any]] = [*inductor_options().items(), *config.get_config_copy().items()]
    settings += [(name, _value(read)) for name, read in _SETTINGS_OF_TORCH.items()]
    # How many processes compile has no effect on what they make.
    return repr(sorted((name, repr(value)) for name, value in settings if name not in ("compile_threads", "debug")))


def _value(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError as error:  # Some cannot be read where they were set by a newer name.
        return str(error)


#: Beside what a call is specialized on. How many threads there are is compiled into loops, and which attention kernels
#: are allowed decides the operators of a graph.
_SETTINGS_OF_TORCH: dict[str, Callable[[], object]] = {
    "threads": torch.get_num_threads,
    "fp32 matmul": torch.get_float32_matmul_precision,
    "tf32": lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    "reduced fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "fill": lambda: getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
}


def inductor_options() -> dict[str, Any]:
    """Inductor's options and their current values."""
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


def compile_ahead(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the forward and backward graphs of AOTAutograd for `body` without a compiler.

    The backward recomputes nothing of the forward, so that random numbers are generated once.
    """
    from functorch.compile import aot_module_simplified, make_boxed_func

    def run_eagerly(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        disable_buffer_donation()
        return make_boxed_func(gm.forward)

    def run_backward_eagerly(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        drop_forward_effects(gm)
        return run_eagerly(gm, example_inputs)

    with compiling(inputs):
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
    returned = output.args[0]
    results = list(returned) if isinstance(returned, tuple | list) else [returned]
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


def vectors() -> str:
    """The vector extension that torch and Inductor use here; `ATEN_CPU_CAPABILITY` can choose a lesser one."""
    return torch.backends.cpu.get_cpu_capability()


def instructions() -> list[str]:
    """The instruction set extensions of the processor, any of which a C++ compiler may use."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):
        return sorted(name for name, found in cpu.get_capabilities().items() if found is True)
    # Older versions of torch have one function for each of those that Inductor checks.
    queries = [name for name in dir(cpu) if re.fullmatch(r"_is_\w+_supported", name)]
    return sorted(name[4:-10] for name in queries if getattr(cpu, name)())


def min_cut_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward that recomputes what is marked and what is cheap, to save few bytes for backward."""
    from functorch.compile import min_cut_rematerialization_partition

    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
    return parts


def plain_partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward without recomputation: all that the backward reads is saved."""
    from functorch.compile import default_partition

    options.pop("compiler", None)  # Only the min-cut partitioner reads it.
    parts: tuple[GraphModule, GraphModule] = default_partition(joint, inputs, **options)
    return parts


def drop_forward_effects(backward: GraphModule) -> None:
    """Removes dead calls of the forward from a backward graph, and what only they read.

    torch's partitioners (2.13) keep asserts, random operators and other side effects of the forward in the backward too
    wherever it has what they need; an assert brings the random operators that it depends on. Eager mode runs them once.
    """
    unused = False
    for node in reversed(backward.graph.nodes):
        # Decompositions and passes of a compiler may have lost the tag of a random operator.
        if node.op == "call_function" and not node.users and (_is_of_forward(node) or is_random(node.target)):
            backward.graph.erase_node(node)
            unused = True
    if unused:
        backward.recompile()


def _is_of_forward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def is_any_recomputed(joint: GraphModule) -> bool:
    """Whether any node is marked for recomputation by torch's partitioners."""
    wanted = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return any(node.meta.get("recompute") in wanted for node in joint.graph.nodes)


def let_inductor_take(partitioner: type[Callable[..., Any]]) -> None:
    """Lets `torch._inductor.config.custom_partitioner_fn` hold partitioners of this class; they need a `uuid`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(partitioner)


def partition_saving(
    joint: GraphModule, inputs: Sequence[Any], choose: Callable[[GraphModule], Sequence[Node]], **options: Any
) -> tuple[GraphModule, GraphModule]:
    """A forward and a backward between which exactly the values that `choose` returns are saved, and needed inputs.

    `choose` gets the joint graph as torch's partitioner has prepared it. torch has no public way to set saved values
    (2.13): its min-cut partitioner asks a function of its own, which is replaced meanwhile.
    """
    from torch._functorch import partitioners

    def chosen(graph: Any, node_info: Any, memory_budget: float = 1) -> list[Node]:
        prepared = joint if joint.graph is graph else graph.owning_module
        saved = set(choose(prepared))
        saved.update(node for node in node_info.inputs)
        return [node for node in graph.nodes if node in saved]

    with _LOCK:
        before = partitioners.choose_saved_values_set
        partitioners.choose_saved_values_set = chosen  # type: ignore[assignment]
        try:
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
        finally:
            partitioners.choose_saved_values_set = before


#: Joint graphs are partitioned one at a time while torch's choice is replaced.
_LOCK = RLock()
