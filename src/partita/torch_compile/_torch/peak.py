"""Compiles a graph of Dynamo with a partitioner of joint graphs of our own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from partita.torch_compile._torch.backends import adopt_origin, sources_of


def compile_with_partitioner(
    gm: GraphModule, inputs: Sequence[Any], partition: Callable[..., Any] | None, *, inner: str
) -> Callable[..., Any]:
    """`gm` compiled by Inductor or `aot_eager`; joint graphs are cut by `partition`.

    Inductor's reuse of dead buffers keeps memory allocated that the plan counts as free (torch 2.11): identical plans
    peak higher with it, and run no faster. So it is switched off.
    """
    if inner == "aot_eager":
        from functorch.compile import default_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        cut = default_partition if partition is None else partition
        # Boxed: what is saved is freed after its last use, while `nop` would keep it until the backward ends.
        compile_eager = aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=cut, keep_inference_input_mutations=True
        )
        eager: Callable[..., Any] = compile_eager(gm, list(inputs))
        return eager
    from functorch.compile import config as settings
    from torch._inductor.compile_fx import compile_fx

    if partition is None:
        plain: Any = compile_fx(gm, list(inputs))
        return plain  # type: ignore[no-any-return]
    patches: dict[str, Any] = {"custom_partitioner_fn": partition, "allow_buffer_reuse": False}
    # AOTAutograd's cache would skip the partitioner, and the step would have no plan; Inductor's cache still serves.
    with settings.patch(enable_autograd_cache=False):
        function: Any = compile_fx(gm, list(inputs), config_patches=patches)
        return function  # type: ignore[no-any-return]


def copied_graph(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A module with a copy of the graph of `gm`, and the same attributes."""
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    adopt_origin(copied, gm, sources=sources_of(gm), args=inputs)
    return copied
