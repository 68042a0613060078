"""Inductor without Dynamo: a body and fake inputs into a function, and that into bytes and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.fx import GraphModule

from partita._torch.backend_aot import nothing_is_donated
from partita._torch.backend_fakes import compiling
from partita._torch.backend_saved_inputs import copy_saved_inputs
from partita._torch.joint_partitioners import drop_forward_effects
from partita._torch.processor import instructions, vectors

__all__ = [
    "compile_with_inductor",
    "function_from_bytes",
    "function_to_bytes",
    "inductor_options",
    "vectors_of_inductor",
]


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
